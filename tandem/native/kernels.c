/* CPU kernels of the engine, for x86-64 with AVX2 and FMA. Built and checked by tandem/native/, called through ctypes.

   Every output is computed in a fixed order that depends neither on the number of rows nor on the thread, so a row's
   result is the same alone and in any batch. The callers check sizes. */

#include "attention.h"
#include "elementwise.h"
#include "matrices.h"
