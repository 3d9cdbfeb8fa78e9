// Threads that share the tasks of a step: the caller works too, and a helper that the system has put aside delays nobody.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace tailrace {

// `each` returns when every task is done, not when every thread has arrived: whoever is awake takes the next task. So
// beside other processes on the same cores a step gets slower by what they take, and never waits for a sleeping helper
// that has taken nothing.
//
// Between `begin` and `end` helpers stay awake: they spin for a moment, then give way to others. Outside they sleep.
class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return 1 + (int)helpers_.size(); }
  void begin();
  void end() { active_.store(false, std::memory_order_relaxed); }

  // Calls task(index, worker) for every index below `count`, in no order; worker is below threads().
  template <class Task>
  void each(int count, Task&& task) {
    run(count, [](void* task, int index, int worker) { (*(Task*)task)(index, worker); }, (void*)&task);
  }

 private:
  typedef void (*Call)(void* task, int index, int worker);

  void run(int count, Call call, void* task);
  bool take(int worker);
  void help(int worker);

  std::vector<std::thread> helpers_;
  // The number of the job in the upper half, how many of its tasks nobody has taken in the lower: one word, so that
  // nobody takes a task of a job that is over.
  alignas(64) std::atomic<uint64_t> open_{0};
  alignas(64) std::atomic<int> left_{0};
  alignas(64) Call call_ = nullptr;
  void* task_ = nullptr;
  std::atomic<bool> active_{false};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  int sleeping_ = 0;
};

}  // namespace tailrace
