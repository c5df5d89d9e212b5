// The threads that share the work of the C++ kernels. `parallel_for` takes the place of torch's (OpenMP's).
//
// OpenMP gives each thread a fixed part and lets all wait for the last one. On a machine where other programs run, a thread
// that is not scheduled then holds up every product of a layer. Here a range is cut into chunks. Each thread first takes the
// chunks of its own part, and then helps with the others. So the caller does all the work where nobody else comes. Threads
// without work wait busily for a moment, and then sleep. And from time to time the caller works alone for a moment: where that
// is faster, because other programs keep the processors busy, it goes on so.

#pragma once

#include <torch/csrc/stable/ops.h>

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace eaglet {

using Body = void (*)(const void* context, int64_t first, int64_t last);

class Team {
 public:
  // The team of this process. A child process that was forked has none of its parent's threads, so it makes its own.
  static Team& of_process() {
    static std::mutex making;
    static Team* team = nullptr;
    std::lock_guard<std::mutex> lock(making);
    if (!team || team->process_ != getpid()) team = new Team;  // it lives until the process ends, as its threads do
    return *team;
  }

  // body(first, last) on chunks that together are [begin, end). False if another caller has the team at the moment.
  bool run(int64_t begin, int64_t end, int64_t grain, int threads, Body body, const void* context) {
    std::unique_lock<std::mutex> caller(callers_, std::try_to_lock);
    if (!caller.owns_lock()) return false;
    const double work = (double)(end - begin) / grain;
    const auto started = Clock::now();
    if (alone()) {
      body(context, begin, end);
      measure(work, started);
      return true;
    }
    while ((int)workers_ + 1 < std::min(threads, MOST)) start_worker();
    threads = std::min(threads, MOST);
    const int64_t count = end - begin, wanted = std::min<int64_t>(threads * PARTS, (count + grain - 1) / grain);
    job_ = {body, context, begin, end, (count + wanted - 1) / wanted};
    threads_.store(threads, std::memory_order_relaxed);
    const int64_t chunks = (count + job_.size - 1) / job_.size;
    left_.store(chunks, std::memory_order_relaxed);
    const uint64_t generation = (generation_.load(std::memory_order_relaxed) + 1) & 0xffffff;
    for (int i = 0; i < threads; ++i) {
      const uint64_t from = chunks * i / threads, to = chunks * (i + 1) / threads;
      ranges_[i].word.store(generation << 40 | from << 20 | to, std::memory_order_release);
    }
    generation_.store((uint32_t)generation, std::memory_order_seq_cst);
    if (sleeping_.load(std::memory_order_seq_cst)) generation_.notify_all();
    this->work(generation, 0, threads);
    wait(left_, [](int64_t left) { return left == 0; });
    measure(work, started);
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
    return true;
  }

  // How long callers have worked alone so far, because that was faster, in seconds.
  double seconds_alone() const { return seconds_alone_.load(std::memory_order_relaxed); }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr int MOST = 256;      // threads
  static constexpr int64_t PARTS = 4;   // chunks of a thread
  static constexpr int SPINS = 2000;    // some 50 microseconds

  struct Job {
    Body body;
    const void* context;
    int64_t begin, end, size;
  };
  // A part of the chunks: the job's generation, the next chunk and the end of the part in one word. Whoever moves it from one
  // value to the next has got a chunk of a job that goes on at least until this chunk is done.
  struct alignas(64) Range {
    std::atomic<uint64_t> word{0};
  };

  // Wait until ready(value): busily for a moment, then asleep.
  template <class T, class Ready>
  void wait(std::atomic<T>& value, Ready ready) {
    for (int i = 0; i < SPINS; ++i) {
      if (ready(value.load(std::memory_order_acquire))) return;
      __builtin_ia32_pause();
    }
    sleeping_.fetch_add(1, std::memory_order_seq_cst);
    for (T seen; !ready(seen = value.load(std::memory_order_seq_cst));) value.wait(seen, std::memory_order_seq_cst);
    sleeping_.fetch_sub(1, std::memory_order_seq_cst);
  }

  // Do chunks of a job, those of part `first` before others.
  void work(uint64_t generation, int first, int threads) {
    int64_t done = 0;
    for (int i = 0; i < threads; ++i) {
      std::atomic<uint64_t>& word = ranges_[(first + i) % threads].word;
      for (uint64_t now = word.load(std::memory_order_acquire);;) {
        if (now >> 40 != generation) break;
        const int64_t chunk = now >> 20 & 0xfffff;
        if (chunk >= (int64_t)(now & 0xfffff)) break;
        if (!word.compare_exchange_weak(now, now + (1 << 20), std::memory_order_acq_rel)) continue;
        const int64_t from = job_.begin + chunk * job_.size;
        try {
          job_.body(job_.context, from, std::min(job_.end, from + job_.size));
        } catch (...) {
          std::lock_guard<std::mutex> lock(failing_);
          error_ = std::current_exception();
        }
        ++done;
        now = word.load(std::memory_order_acquire);
      }
    }
    // A job ends when its last chunk is counted here. So whoever has done a chunk sees no part of a later job above.
    if (done && left_.fetch_sub(done, std::memory_order_seq_cst) == done && first && sleeping_.load()) left_.notify_all();
  }

  void start_worker() {
    const int number = ++workers_;
    std::thread([this, number] {
      for (uint32_t seen = 0;;) {
        wait(generation_, [seen](uint32_t now) { return now != seen; });
        seen = generation_.load(std::memory_order_acquire);
        const int threads = threads_.load(std::memory_order_relaxed);  // of this job, or of one that came since
        if (number < threads) work(seen, number, threads);
      }
    }).detach();
  }

  // Callers compare working together with working alone: two short trials of each in turn, and then a long window of what was
  // faster. The windows of an unchanged winner grow longer. On a busy machine a trial together looks better than it is, because
  // the system favours threads that have slept. So together must be clearly faster, above all while a caller works alone.
  bool alone() const { return trial_ < TRIALS ? trial_ % 2 == 1 : faster_alone_; }

  // Count a job, which is as large as so many grains, and end the window where its time is over.
  void measure(double work, Clock::time_point started) {
    seconds_ += std::chrono::duration<double>(Clock::now() - started).count();
    work_ += work;
    if (seconds_ < (trial_ < TRIALS ? TRIAL : window_)) return;
    if (trial_ < TRIALS) {
      rates_[trial_ % 2] += work_ / seconds_;
      if (++trial_ == TRIALS) {
        ratio_ = std::sqrt(ratio_ * rates_[1] / rates_[0]);  // half of it from the trials before
        const bool faster_alone = ratio_ > (faster_alone_ ? STAYS : BECOMES);
        window_ = faster_alone == faster_alone_ ? std::min(2 * window_, LONGEST) : SHORTEST;
        faster_alone_ = faster_alone;
      }
    } else {
      if (faster_alone_) seconds_alone_.store(seconds_alone() + seconds_, std::memory_order_relaxed);
      trial_ = 0;
      rates_[0] = rates_[1] = 0;
    }
    seconds_ = work_ = 0;
  }
  static constexpr int TRIALS = 4;
  static constexpr double TRIAL = 0.015, SHORTEST = 0.2, LONGEST = 2;  // seconds
  static constexpr double BECOMES = 0.93, STAYS = 0.88;  // alone, where the ratio of the rates is above it

  const pid_t process_ = getpid();
  std::mutex callers_, failing_;
  Job job_{};
  std::atomic<int> threads_{0};
  Range ranges_[MOST];
  std::atomic<uint32_t> generation_{0};
  std::atomic<int64_t> left_{0};
  std::atomic<int> sleeping_{0};
  std::atomic<int> workers_{0};
  std::exception_ptr error_;
  int trial_ = 0;  // the trials that are done since the last long window
  bool faster_alone_ = false;
  double seconds_ = 0, work_ = 0, rates_[2] = {}, window_ = SHORTEST;  // of the window that goes on
  double ratio_ = 0.5;  // of the rate alone to that together
  std::atomic<double> seconds_alone_{0};
};

// body(first, last) on parts of [begin, end) by as many threads as torch has. A part has at least `grain` elements, but the
// last one may have fewer.
template <class F>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const F& body) {
  const int64_t pieces = (end - begin + grain - 1) / grain;
  if (pieces <= 0) return;
  const int threads = pieces > 1 ? (int)std::min<int64_t>(torch::stable::get_num_threads(), pieces) : 1;
  const Body call = [](const void* context, int64_t first, int64_t last) { (*(const F*)context)(first, last); };
  if (threads == 1 || !Team::of_process().run(begin, end, grain, threads, call, &body)) body(begin, end);
}

}  // namespace eaglet
