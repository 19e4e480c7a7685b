// The threads that run plans: the caller, and helpers that stay from one plan to the next.
//
// Threads take the items of a phase from one counter, and the one that completes the last item opens the next phase. So a
// thread that loses its core delays the item that it holds and nothing else. Who finds nothing to do spins for a moment.
// Then it runs an item that another thread still holds, if the plan allows that: the first to complete it counts. If not,
// it sleeps, which lets the system run the other thread there. A plan is over when no thread works on it.
// A helper that finds itself on the caller's core moves to another one.

#include "plan.h"

#include <chrono>
#include <climits>
#include <csignal>
#include <pthread.h>
#include <system_error>
#include <thread>
#include <utility>
#ifdef __linux__
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr std::chrono::microseconds SPIN{30}; // about what it takes to sleep and to be woken; longer than most items
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
  // Runs the phases, of which there is one at least, or returns false if another thread's plan runs just now.
  bool run(const Phase *begin, const Phase *end, int num_threads, bool has_repeats, void (*at_stop)()) {
    if (is_busy_.test_and_set(std::memory_order_acquire)) return false;
    employ(num_threads - 1);
    begin_ = begin;
    end_ = end;
    has_repeats_ = has_repeats;
    first_turn_ = turn_of(ticket_.load(std::memory_order_relaxed)) + 1;
    is_over_.store(false);
    open(begin);
    for (int num_stops = 0;;) {
      uint32_t seen = signal_.load(std::memory_order_acquire);
      bool is_over = is_over_.load();
      int reached = num_stops_.load(std::memory_order_relaxed);
      if (reached != num_stops && at_stop != nullptr) at_stop();
      num_stops = reached;
      if (is_over && num_inside_.load() == 0) break;
      caller_core_.store(current_core(), std::memory_order_relaxed);
      if (!take_item() && !spin(seen) && !repeat_item()) sleep(seen);
    }
    is_busy_.clear(std::memory_order_release);
    return true;
  }

private:
  static constexpr uint64_t LEFT = (uint64_t{1} << 32) - 1; // the half of the ticket that counts the items left

  static uint32_t turn_of(uint64_t ticket) { return static_cast<uint32_t>(ticket >> 32); }

  // Begins a phase, or ends the plan. Only one thread can be here: the first to complete the last item.
  void open(const Phase *phase) {
    if (phase == end_) {
      is_over_.store(true);
    } else {
      num_done_.store(0, std::memory_order_relaxed);
      num_stops_.store(phase->num_stops, std::memory_order_relaxed);
      uint64_t turn = first_turn_ + static_cast<uint32_t>(phase - begin_); // a late thread's exchange fails
      ticket_.store(turn << 32 | static_cast<uint64_t>(phase->num_items), std::memory_order_release);
    }
    tell();
  }

  bool take_item() {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    do {
      if ((ticket & LEFT) == 0) return false;
    } while (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel, std::memory_order_acquire));
    const Phase *phase = begin_ + (turn_of(ticket) - first_turn_);
    complete(phase, phase->num_items - static_cast<int64_t>(ticket & LEFT));
    return true;
  }

  // Runs an item that another thread has begun.
  bool repeat_item() {
    if (!has_repeats_) return false;
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    auto idx = static_cast<int32_t>(turn_of(ticket) - first_turn_);
    if (idx < 0 || (ticket & LEFT) != 0) return false; // the first phase is not open; there are items to take
    const Phase *phase = begin_ + idx;
    for (int64_t item = phase->num_items - 1; item >= 0; --item) {
      if (phase->is_done[item].load(std::memory_order_acquire)) continue;
      complete(phase, item);
      return true;
    }
    return false;
  }

  void complete(const Phase *phase, int64_t item) {
    phase->run(phase->work, item);
    if (phase->is_done[item].exchange(true, std::memory_order_acq_rel)) return; // another thread was first
    if (num_done_.fetch_add(1, std::memory_order_acq_rel) + 1 == phase->num_items) open(phase + 1);
  }

  // A helper's work on a plan, which stays until the helper is outside again. False if there was nothing to do.
  bool work(bool (Team::*next)()) {
    if (is_over_.load()) return false;
    num_inside_.fetch_add(1);
    bool has_worked = false;
    while (!is_over_.load() && (this->*next)()) {
      has_worked = true;
      if (current_core() == caller_core_.load(std::memory_order_relaxed)) leave_core();
    }
    num_inside_.fetch_sub(1);
    if (is_over_.load()) tell();
    return has_worked;
  }

  // For a moment, or until something has happened since `signal_` was `seen`. Returns whether it has.
  bool spin(uint32_t seen) {
    const auto until = std::chrono::steady_clock::now() + SPIN;
    do {
      for (int i = 0; i < POLLS; ++i) {
        if (signal_.load(std::memory_order_acquire) != seen) return true;
        relax();
      }
    } while (std::chrono::steady_clock::now() < until);
    return false;
  }

  static int current_core() {
#ifdef __linux__
    return sched_getcpu();
#else
    return -1;
#endif
  }

  // Moves this thread away from a core that it shares with the caller. The system wakes it there if the others are taken
  // for a moment, and leaves it there for many milliseconds after they are idle again.
  static void leave_core() {
#ifdef __linux__
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    cpu_set_t others = allowed;
    CPU_CLR(sched_getcpu(), &others);
    if (sched_setaffinity(0, sizeof others, &others) == 0) sched_setaffinity(0, sizeof allowed, &allowed);
#endif
  }

  void tell() {
    signal_.fetch_add(1);
    if (num_sleepers_.load() > 0) wake();
  }

  void sleep(uint32_t seen) {
    num_sleepers_.fetch_add(1);
#ifdef __linux__
    syscall(SYS_futex, &signal_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
#else
    if (signal_.load() == seen) std::this_thread::sleep_for(SPIN);
#endif
    num_sleepers_.fetch_sub(1);
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
      const auto does = [&](bool (Team::*next)()) { return idx < num_helpers_.load() && work(next); };
      if (!does(&Team::take_item) && !spin(seen) && !does(&Team::repeat_item)) sleep(seen);
    }
  }

  alignas(64) std::atomic<uint64_t> ticket_{0}; // which phase it is, and how many of its items no thread has taken
  alignas(64) std::atomic<int64_t> num_done_{0};
  alignas(64) std::atomic<uint32_t> signal_{0}; // changes with each phase, at the end, and as helpers leave then
  std::atomic<int> num_sleepers_{0}, num_helpers_{0}, num_stops_{0};
  std::atomic<int> num_inside_{0}; // helpers that may look at the plan
  std::atomic<int> caller_core_{-1};
  std::atomic<bool> is_over_{true};
  std::atomic_flag is_busy_ = ATOMIC_FLAG_INIT;
  const Phase *begin_ = nullptr, *end_ = nullptr;
  bool has_repeats_ = false;
  uint32_t first_turn_ = 0;
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

int Plan::run(void (*at_stop)()) {
  workspace_ = scratch<Plan>(workspace_bytes_);
  if (workspace_ == nullptr) return 1;
  int64_t num_items = 0;
  for (const Phase &phase : phases_) num_items += phase.num_items;
  std::unique_ptr<std::atomic<bool>[]> is_done(new std::atomic<bool>[static_cast<size_t>(num_items)]());
  num_items = 0;
  for (Phase &phase : phases_) phase.is_done = is_done.get() + std::exchange(num_items, num_items + phase.num_items);
  const Phase *begin = phases_.data(), *end = begin + phases_.size();
  if (num_threads_ <= 1 || begin == end || !team().run(begin, end, num_threads_, has_repeats_, at_stop))
    run_alone(begin, end, at_stop);
  return has_failed_.load() ? 1 : 0;
}
