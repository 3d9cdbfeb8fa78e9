#include "pool.h"

#include <sched.h>

namespace tailrace {
namespace {

constexpr int kSpins = 2000;  // some 20 µs: longer than between two jobs of a step, shorter than a wake-up

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Pool::Pool(int threads) {
  for (int worker = 1; worker < threads; worker++) helpers_.emplace_back([this, worker] { help(worker); });
}

Pool::~Pool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_.store(true);
  }
  wake_.notify_all();
  for (std::thread& helper : helpers_) helper.join();
}

void Pool::begin() {
  std::lock_guard<std::mutex> lock(mutex_);
  active_.store(true, std::memory_order_relaxed);
  if (sleeping_) wake_.notify_all();
}

void Pool::run(int count, Call call, void* task) {
  if (count <= 0) return;
  if (count == 1 || helpers_.empty()) {
    for (int index = 0; index < count; index++) call(task, index, 0);
    return;
  }
  call_ = call;
  task_ = task;
  left_.store(count, std::memory_order_relaxed);
  const uint64_t job = (open_.load(std::memory_order_relaxed) >> 32) + 1;
  open_.store(job << 32 | (uint32_t)count, std::memory_order_release);
  while (take(0)) {
  }
  for (int spins = 0; left_.load(std::memory_order_acquire) != 0; spins++) {
    if (spins < kSpins) pause();
    else sched_yield();
  }
}

bool Pool::take(int worker) {
  uint64_t open = open_.load(std::memory_order_acquire);
  do {
    if ((uint32_t)open == 0) return false;
  } while (!open_.compare_exchange_weak(open, open - 1, std::memory_order_acq_rel, std::memory_order_acquire));
  // Its task isn't done, so the job is still the one that was read.
  call_(task_, (int)(uint32_t)open - 1, worker);
  left_.fetch_sub(1, std::memory_order_release);
  return true;
}

void Pool::help(int worker) {
  for (int spins = 0; !stop_.load(std::memory_order_relaxed); spins++) {
    if (take(worker)) {
      spins = 0;
    } else if (spins < kSpins) {
      pause();
    } else if (active_.load(std::memory_order_relaxed)) {
      sched_yield();
    } else {
      std::unique_lock<std::mutex> lock(mutex_);
      sleeping_++;
      wake_.wait(lock, [this] { return active_.load() || stop_.load(); });
      sleeping_--;
      spins = 0;
    }
  }
}

}  // namespace tailrace
