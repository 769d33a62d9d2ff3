/* CPU kernels of the engine, for x86-64 with AVX2 and FMA. Built and checked by tandem/native/, called through ctypes.

   Every output value is computed in one fixed order that depends neither on how many rows there are nor on which
   thread has them, so a row's result is the same alone and in any batch. Sizes are checked by the callers. */

#include "attention.h"
#include "elementwise.h"
#include "matrices.h"
