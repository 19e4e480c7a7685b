// Runs random plans by several threads at once, and checks each item: it ran once, after all of the phases before it.
//
// Arguments: seed, number of plans. Ends with 1 and a word about the first mistake.

#include "plan.h"

#include <cstdio>
#include <memory>
#include <random>
#include <thread>

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
    Plan plan;
    const int num_phases = draw(0, 12), num_threads = draw(1, 5);
    auto counts = std::make_unique<std::atomic<int>[]>(static_cast<size_t>(num_phases) * 64 + 1);
    auto done = std::make_unique<std::atomic<int>[]>(static_cast<size_t>(num_phases) + 1);
    int num_items_before = 0;
    bool has_stops = false;
    std::atomic<int> *total = &done[num_phases];
    for (int p = 0; p < num_phases; ++p) {
      const int num_items = draw(0, 40), work = draw(0, 200);
      if (draw(0, 2) == 0) {
        plan.stop();
        has_stops |= num_items > 0;
      }
      plan.add(num_items, [=, counts = counts.get() + p * 64](int64_t item) {
        check(total->load() >= num_items_before, "a phase began before the one before it was done");
        for (volatile int i = 0; i < work; ++i) {
        }
        check(counts[item].fetch_add(1) == 0, "an item ran twice");
        total->fetch_add(1);
      });
      num_items_before += num_items;
    }
    num_stops_seen = 0;
    plan.reserve(draw(0, 1 << 16));
    check(plan.run(num_threads, at_stop) == 0, "a plan failed");
    check(total->load() == num_items_before, "an item did not run before the plan was over");
    check(has_stops <= num_stops_seen && num_stops_seen <= num_phases, "stops were called too often, or never");
  }
}

} // namespace

int main(int, char **arguments) {
  const unsigned seed = static_cast<unsigned>(std::atoi(arguments[1]));
  const int num_plans = std::atoi(arguments[2]);
  std::thread other(run_plans, seed + 1, num_plans); // of two plans at once, one runs without the team
  run_plans(seed, num_plans);
  other.join();
  return num_mistakes.load() > 0;
}
