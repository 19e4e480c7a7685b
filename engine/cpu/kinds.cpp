// Which kernels this CPU can run.

#include "kinds.h"
#include "tiles.h"

#ifdef HAS_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

extern "C" {

// The most capable kind on this machine.
int tandem_best_kind() {
#ifdef HAS_AMX
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18; // of arch_prctl: tiles are off in each new process
  if (syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0) return AMX_BF16;
#endif
#ifdef __AVX512BF16__
  return AVX512_BF16;
#else
  return VECTORS;
#endif
}

// The fastest kind on this machine. AMD's CPUs multiply pairs of bfloat16 at twice the rate of floats, Intel's at half of
// it: 30 against 62 FLOP a cycle and core, on an Emerald Rapids.
int tandem_fastest_kind() {
  const int best = tandem_best_kind();
#ifdef __x86_64__
  if (best == AVX512_BF16 && __builtin_cpu_is("intel")) return VECTORS;
#endif
  return best;
}

// What the portable vectors were compiled to.
const char *tandem_vector_target() {
#if defined(__AVX512F__)
  return "avx512";
#elif defined(__AVX2__)
  return "avx2";
#elif defined(__ARM_NEON)
  return "neon";
#else
  return "base";
#endif
}
}
