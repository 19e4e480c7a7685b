// The threads that run plans: the caller, and helpers that stay from one plan to the next.
//
// Threads take the items of a phase from one counter, and whoever completes the last item opens the next phase. So a
// thread that loses its core delays the item that it holds and nothing else: no thread is waited for, only items. Who
// finds nothing to do spins for a moment and then sleeps, which lets the system run a thread that holds an item there.

#include "plan.h"

#include <chrono>
#include <climits>
#include <csignal>
#include <pthread.h>
#include <system_error>
#include <thread>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr std::chrono::microseconds SPIN{30}; // about what it takes to sleep and to be woken
constexpr int POLLS = 16;                     // looks between two looks at the clock

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Team {
public:
  // Runs the phases, or returns false if another thread's plan runs just now.
  bool run(const Phase *begin, const Phase *end, int num_threads, void (*at_stop)()) {
    if (is_busy_.test_and_set(std::memory_order_acquire)) return false;
    employ(num_threads - 1);
    is_over_.store(false, std::memory_order_relaxed);
    num_stops_.store(0, std::memory_order_relaxed);
    end_ = end;
    open(begin);
    for (int num_stops = 0;;) {
      uint32_t seen = signal_.load(std::memory_order_acquire);
      bool is_over = is_over_.load(std::memory_order_acquire);
      int reached = num_stops_.load(std::memory_order_relaxed);
      if (reached != num_stops && at_stop != nullptr) at_stop();
      num_stops = reached;
      if (is_over) break;
      if (!take_item()) wait(seen);
    }
    is_busy_.clear(std::memory_order_release);
    return true;
  }

private:
  static constexpr uint64_t LEFT = (uint64_t{1} << 32) - 1; // the half of the ticket that counts the items left

  // Begins a phase, or ends the plan. Only one thread can be here: it holds no item, and there are no others.
  void open(const Phase *phase) {
    if (phase == end_) {
      is_over_.store(true, std::memory_order_release); // from here on the next plan may begin
    } else {
      phase_ = phase;
      num_done_.store(0, std::memory_order_relaxed);
      num_stops_.store(phase->num_stops, std::memory_order_relaxed);
      uint64_t turn = (ticket_.load(std::memory_order_relaxed) >> 32) + 1; // a late thread's exchange fails
      ticket_.store(turn << 32 | static_cast<uint64_t>(phase->num_items), std::memory_order_release);
    }
    signal_.fetch_add(1);
    if (num_sleepers_.load() > 0) wake();
  }

  bool take_item() {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    do {
      if ((ticket & LEFT) == 0) return false;
    } while (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel, std::memory_order_acquire));
    const Phase *phase = phase_; // it stays while this item is not done
    int64_t num_items = phase->num_items;
    phase->run(phase->work, num_items - static_cast<int64_t>(ticket & LEFT));
    if (num_done_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_items) open(phase + 1);
    return true;
  }

  // Until something has happened since `signal_` was `seen`.
  void wait(uint32_t seen) {
    const auto until = std::chrono::steady_clock::now() + SPIN;
    do {
      for (int i = 0; i < POLLS; ++i) {
        if (signal_.load(std::memory_order_acquire) != seen) return;
        relax();
      }
    } while (std::chrono::steady_clock::now() < until);
    num_sleepers_.fetch_add(1);
    sleep(seen);
    num_sleepers_.fetch_sub(1);
  }

  void sleep(uint32_t seen) {
#ifdef __linux__
    syscall(SYS_futex, &signal_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
#else
    if (signal_.load() == seen) std::this_thread::sleep_for(SPIN);
#endif
  }

  void wake() {
#ifdef __linux__
    syscall(SYS_futex, &signal_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#endif
  }

  // Lets this many helpers work. Fewer do if the system refuses a thread.
  void employ(int num_helpers) {
    for (; num_started_ < num_helpers; ++num_started_)
      if (!start(num_started_)) break;
    num_helpers_.store(num_helpers, std::memory_order_relaxed);
  }

  bool start(int idx) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); // signals are for the threads of Python
    bool has_started = true;
    try {
      std::thread([this, idx] { help(idx); }).detach();
    } catch (const std::system_error &) {
      has_started = false;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return has_started;
  }

  void help(int idx) {
    while (true) {
      uint32_t seen = signal_.load(std::memory_order_acquire);
      if (idx >= num_helpers_.load(std::memory_order_relaxed) || !take_item()) wait(seen);
    }
  }

  alignas(64) std::atomic<uint64_t> ticket_{0}; // which phase it is, and how many of its items no thread has taken
  alignas(64) std::atomic<int64_t> num_done_{0};
  alignas(64) std::atomic<uint32_t> signal_{0}; // changes with each phase and at the end
  std::atomic<int> num_sleepers_{0}, num_helpers_{0}, num_stops_{0};
  std::atomic<bool> is_over_{true};
  std::atomic_flag is_busy_ = ATOMIC_FLAG_INIT;
  const Phase *phase_ = nullptr, *end_ = nullptr;
  int num_started_ = 0;
};

Team &team() {
  static Team *team = new Team; // never deleted: helpers use it to the end of the process
  return *team;
}

void run_alone(const Phase *begin, const Phase *end, void (*at_stop)()) {
  int num_stops = 0;
  for (const Phase *phase = begin; phase != end; ++phase) {
    if (phase->num_stops != num_stops && at_stop != nullptr) at_stop();
    num_stops = phase->num_stops;
    for (int64_t item = 0; item < phase->num_items; ++item) phase->run(phase->work, item);
  }
}

} // namespace

int Plan::run(int num_threads, void (*at_stop)()) {
  workspace_ = scratch<Plan>(workspace_bytes_);
  if (workspace_ == nullptr) return 1;
  const Phase *begin = phases_.data(), *end = begin + phases_.size();
  if (num_threads <= 1 || !team().run(begin, end, num_threads, at_stop)) run_alone(begin, end, at_stop);
  return has_failed_.load() ? 1 : 0;
}
