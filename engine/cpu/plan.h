// A kernel's work as a plan: phases that follow each other, each of independent items for any thread of a team.

#pragma once

#include "scratch.h"

#include <atomic>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

struct Phase {
  static constexpr size_t ROOM = 352;
  void (*run)(const void *work, int64_t item);
  int64_t num_items;
  std::atomic<bool> *is_done; // [num_items]
  int num_stops;              // before it, since the plan began
  alignas(16) unsigned char work[ROOM];
};

class Plan {
public:
  explicit Plan(int num_threads) : num_threads_(num_threads) {}

  // About how many items after this one the thread's next item is.
  int64_t stride() const { return std::max(num_threads_, 1); }

  // From now on an item may run on several threads at once, so that no thread is waited for that has lost its core: they
  // all store the same bytes. So no phase may change what it reads itself, or what an earlier one has read or written.
  void allow_repeats() { has_repeats_ = true; }
  bool has_repeats() const { return has_repeats_; }

  // `work(item)` for each of the items, once what was added before is done. It is copied, with what it captures.
  template <typename Work> void add(int64_t num_items, const Work &work) {
    static_assert(sizeof(Work) <= Phase::ROOM && std::is_trivially_copyable_v<Work>);
    if (num_items <= 0) return;
    Phase &phase = phases_.emplace_back();
    phase.run = [](const void *kept, int64_t item) { (*static_cast<const Work *>(kept))(item); };
    phase.num_items = num_items;
    phase.num_stops = num_stops_;
    std::memcpy(phase.work, &work, sizeof work);
  }

  // A place at which the caller's `at_stop` is called; other threads go on meanwhile. Stops may be called late, and some
  // as one.
  void stop() { ++num_stops_; }

  // Where in `workspace` there are this many bytes for the phases to come. Without repeats, later ones reuse them.
  int64_t reserve(int64_t bytes) {
    const int64_t offset = has_repeats_ ? workspace_bytes_ : 0;
    workspace_bytes_ = std::max(workspace_bytes_, offset + (bytes + 63) / 64 * 64);
    return offset;
  }
  void *workspace(int64_t offset) const { return static_cast<char *>(workspace_) + offset; }

  // A table that lives as long as the plan; `work` may point into it.
  template <typename T> const T *keep(std::vector<T> table) {
    const auto kept = std::make_shared<const std::vector<T>>(std::move(table));
    tables_.push_back(kept);
    return kept->data();
  }

  // For an item whose thread lacks memory.
  void fail() { has_failed_.store(true, std::memory_order_relaxed); }

  // Returns 0, or 1 if memory was lacking.
  int run(void (*at_stop)() = nullptr);

private:
  const int num_threads_;
  std::vector<Phase> phases_;
  std::vector<std::shared_ptr<const void>> tables_;
  int num_stops_ = 0;
  bool has_repeats_ = false;
  int64_t workspace_bytes_ = 0;
  void *workspace_ = nullptr;
  std::atomic<bool> has_failed_{false};
};
