// Memory that a calling thread keeps from one call to the next.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>

namespace {

// At least this many bytes with any content, or null. Each `User` has memory of its own.
template <typename User> void *scratch(int64_t bytes) {
  struct Free {
    void operator()(void *memory) const { std::free(memory); }
  };
  thread_local std::unique_ptr<void, Free> memory;
  thread_local int64_t size = 0;
  bytes = std::max<int64_t>(bytes, 1); // nothing to do is not a lack of memory
  if (bytes > size) {
    memory.reset(); // first, so that both never exist
    size = (bytes + 63) / 64 * 64;
    memory.reset(std::aligned_alloc(64, static_cast<size_t>(size)));
    if (memory == nullptr) size = 0;
  }
  return memory.get();
}

} // namespace
