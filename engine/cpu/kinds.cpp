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
