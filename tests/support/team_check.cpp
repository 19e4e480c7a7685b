// Runs random plans by several threads at once, and checks each item: it ran, once unless the plan allows repeats, after
// all of the phases before it, and not after the plan. Then holds items until another thread repeats them.
//
// Arguments: seed, number of plans. Ends with 1 and a word about the first mistake.

#include "plan.h"

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>
#ifdef __linux__
#include <sched.h>
#endif

namespace {

std::atomic<int> num_mistakes{0};
thread_local int num_stops_seen = 0;

void at_stop() { ++num_stops_seen; }

void check(bool is_right, const char *what) {
  if (!is_right && num_mistakes.fetch_add(1) == 0) std::fprintf(stderr, "%s\n", what);
}

void run_plans(unsigned seed, int num_plans) {
  std::mt19937 random(seed);
  const auto draw = [&random](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  for (int n = 0; n < num_plans; ++n) {
    const int num_phases = draw(0, 12);
    Plan plan(draw(1, 5));
    const bool has_repeats = draw(0, 1) == 1;
    if (has_repeats) plan.allow_repeats();
    auto counts = std::make_unique<std::atomic<int>[]>(static_cast<size_t>(num_phases) * 64 + 1);
    std::vector<int> num_items;
    bool has_stops = false;
    const auto count = [&counts](const std::vector<int> &phases) {
      int num_run = 0;
      for (size_t p = 0; p < phases.size(); ++p)
        for (int item = 0; item < phases[p]; ++item) num_run += counts[p * 64 + item].load() > 0;
      return num_run;
    };
    for (int p = 0; p < num_phases; ++p) {
      const int work = draw(0, 200), num_before = std::accumulate(num_items.begin(), num_items.end(), 0);
      num_items.push_back(draw(0, 40));
      if (draw(0, 2) == 0) {
        plan.stop();
        has_stops |= num_items[p] > 0;
      }
      plan.add(num_items[p], [=, &num_items, &count, counts = counts.get() + p * 64](int64_t item) {
        const std::vector<int> before(num_items.begin(), num_items.begin() + p);
        check(count(before) == num_before, "a phase began before the one before it was done");
        for (volatile int i = 0; i < work; ++i) {
        }
        check(counts[item].fetch_add(1) == 0 || has_repeats, "an item ran twice");
      });
    }
    num_stops_seen = 0;
    plan.reserve(draw(0, 1 << 16));
    check(plan.run(at_stop) == 0, "a plan failed");
    check(count(num_items) == std::accumulate(num_items.begin(), num_items.end(), 0), "an item did not run");
    check(has_stops <= num_stops_seen && num_stops_seen <= num_phases, "stops were called too often, or never");
  }
}

// In each phase the thread that begins an item first goes on when another one has begun it too.
void hold_items(int num_plans) {
  for (int n = 0; n < num_plans; ++n) {
    Plan plan(2);
    plan.allow_repeats();
    std::atomic<int> counts[3] = {}, num_inside{0};
    for (auto &count : counts) {
      plan.add(5, [&count, &num_inside, held = n % 5](int64_t item) {
        num_inside.fetch_add(1);
        const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
        if (item == held) count.fetch_add(1);
        while (item == held && count.load() < 2 && std::chrono::steady_clock::now() < until) std::this_thread::yield();
        num_inside.fetch_sub(1);
      });
    }
    check(plan.run() == 0, "a plan failed");
    check(num_inside.load() == 0, "an item ran after the plan was over");
    for (auto &count : counts) check(count.load() == 2, "an item that a thread held was not repeated");
  }
}

// Helpers move from core to core, but stay free to run wherever the process may.
void check_cores() {
#ifdef __linux__
  cpu_set_t allowed, own;
  sched_getaffinity(0, sizeof own, &own);
  for (const auto &task : std::filesystem::directory_iterator("/proc/self/task")) {
    check(sched_getaffinity(std::stoi(task.path().filename()), sizeof allowed, &allowed) == 0, "a thread is lost");
    check(CPU_EQUAL(&allowed, &own), "a thread is bound to cores");
  }
#endif
}

} // namespace

int main(int, char **arguments) {
  const unsigned seed = static_cast<unsigned>(std::atoi(arguments[1]));
  const int num_plans = std::atoi(arguments[2]);
  std::thread other(run_plans, seed + 1, num_plans); // of two plans at once, one runs without the team
  run_plans(seed, num_plans);
  other.join();
  hold_items(num_plans / 10);
  check_cores();
  return num_mistakes.load() > 0;
}
