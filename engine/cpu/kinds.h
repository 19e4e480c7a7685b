// The kinds of kernels. Between two kinds the last bits of a result differ, so blocks of KV are never shared.

#pragma once

namespace {

// VECTORS takes any element type; the others take bfloat16.
enum Kind : int { VECTORS = 0, AVX512_BF16 = 1, AMX_BF16 = 2 };

} // namespace
