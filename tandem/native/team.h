/* Threads that share the parts of a kernel. The caller takes parts itself, and waits only for parts that helpers have
   started. So a helper without a core does not delay the caller, as it would at a barrier. Parts must be independent of
   each other and of the thread that runs them. */

#pragma once

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MOST_HELPERS 255
#define NO_PARTS UINT32_MAX
#define PAUSES 16 /* pause instructions between two polls of shared memory */
#define LOOKS 200 /* polls before a helper sleeps: longer than the gap between two kernels of a step */

/* Runs one part of a job. `worker`: 0 is the caller; helpers have 1 up to the job's threads - 1. */
typedef void (*part_of_job)(const void *job, int64_t part, int worker);

static struct {
  atomic_flag taken;         /* by a caller; a concurrent caller works alone */
  _Atomic uint64_t next;     /* number of a job << 32 | its next part; NO_PARTS while the fields below change */
  _Atomic(part_of_job) work;
  _Atomic(const void *) job;
  _Atomic uint32_t parts;
  _Atomic int threads;
  _Atomic uint32_t done;     /* parts */
  _Atomic uint32_t sleepers; /* helpers */
  _Atomic uint32_t calls;    /* wake-ups of helpers */
  int helpers;
} team = {.taken = ATOMIC_FLAG_INIT, .next = NO_PARTS};

/* Runs a part, if one is left. The job's fields were read consistently if `next` has not changed since. */
static int take_part(int worker) {
  uint64_t next = atomic_load(&team.next);
  const part_of_job work = atomic_load_explicit(&team.work, memory_order_acquire);
  const void *job = atomic_load_explicit(&team.job, memory_order_acquire);
  const uint32_t parts = atomic_load_explicit(&team.parts, memory_order_acquire), part = (uint32_t)next;
  if (part >= parts || worker >= atomic_load_explicit(&team.threads, memory_order_acquire)) return 0;
  if (atomic_compare_exchange_strong(&team.next, &next, next + 1)) {
    work(job, part, worker);
    atomic_fetch_add_explicit(&team.done, 1, memory_order_release);
  }
  return 1;
}

static void rest(void) {
  for (int i = 0; i < PAUSES; i++) _mm_pause();
}

static void *help(void *number) {
  const int worker = (int)(intptr_t)number;
  for (int looks = 0;;) {
    if (take_part(worker)) {
      looks = 0;
    } else if (++looks < LOOKS) {
      rest();
    } else {
      const uint32_t calls = atomic_load(&team.calls);
      atomic_fetch_add(&team.sleepers, 1);
      if (!take_part(worker)) syscall(SYS_futex, &team.calls, FUTEX_WAIT_PRIVATE, calls, 0, 0, 0);
      atomic_fetch_sub(&team.sleepers, 1);
      looks = 0;
    }
  }
  return 0;
}

/* A forked process has no helpers. */
static void forget(void) {
  team.helpers = 0;
  atomic_store(&team.sleepers, 0);
  atomic_flag_clear(&team.taken);
}

__attribute__((constructor)) static void begin(void) { pthread_atfork(0, 0, forget); }

/* Helpers never end, and block signals, which the interpreter's threads handle. */
static void hire(int helpers) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  for (pthread_t thread; team.helpers < helpers && team.helpers < MOST_HELPERS; team.helpers++) {
    if (pthread_create(&thread, 0, help, (void *)(intptr_t)(team.helpers + 1))) break;
    pthread_detach(thread);
  }
  pthread_sigmask(SIG_SETMASK, &before, 0);
}

/* Runs all parts on at most `threads` threads, and returns when they are done. */
static void share(int threads, int64_t parts, part_of_job work, const void *job) {
  if (threads <= 1 || parts <= 1 || parts >= NO_PARTS || atomic_flag_test_and_set(&team.taken)) {
    for (int64_t part = 0; part < parts; part++) work(job, part, 0);
    return;
  }
  hire(threads - 1);
  const uint64_t number = (atomic_load(&team.next) >> 32) + 1;
  atomic_store(&team.next, number << 32 | NO_PARTS);
  atomic_store_explicit(&team.work, work, memory_order_release);
  atomic_store_explicit(&team.job, job, memory_order_release);
  atomic_store_explicit(&team.parts, (uint32_t)parts, memory_order_release);
  atomic_store_explicit(&team.threads, threads, memory_order_release);
  atomic_store(&team.done, 0);
  atomic_store(&team.next, number << 32);
  if (atomic_load(&team.sleepers)) {
    atomic_fetch_add(&team.calls, 1);
    syscall(SYS_futex, &team.calls, FUTEX_WAKE_PRIVATE, threads - 1, 0, 0, 0);
  }
  while (take_part(0)) {
  }
  for (int looks = 1; atomic_load_explicit(&team.done, memory_order_acquire) < parts; looks++) {
    rest();
    if (looks % LOOKS == 0) sched_yield(); /* a helper may need this core */
  }
  atomic_flag_clear(&team.taken);
}
