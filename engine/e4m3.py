"""Triton functions for numbers in 8 bits, float8_e4m3fn, by integers: Ampere has no instructions that convert them.

A byte is a sign, four bits of exponent with bias 7, and three of fraction. The largest number is 448. There is no
infinity; 0x7F and 0xFF are NaN.
"""

import triton
import triton.language as tl


@triton.jit
def e4m3_over_256(bits):
    """Numbers from their bytes, as int8, divided by 256: exact, except that NaN becomes +-1.875.

    float16 has the same fields with one more bit of exponent, at the top, whose bias is 8 more.
    """
    return ((bits.to(tl.int16) << 7) & -0x4001).to(tl.float16, bitcast=True)  # without the second copy of the sign


@triton.jit
def e4m3_or_nan_over_256(bits):
    """As `e4m3_over_256`, and NaN stays NaN."""
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), e4m3_over_256(bits))


@triton.jit
def to_e4m3(x):
    """The bytes, as int8, of numbers rounded to the nearest, ties to even. Larger ones become 448, NaN stays NaN."""
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # The other bias of the exponent, and 20 bits of fraction fewer. A carry of the fraction raises the exponent.
    normal = (size - (120 << 23) + 0x7FFFF + ((size >> 20) & 1)) >> 20
    # Below 2^-6 all steps are 2^-9, as those of float32 from 2^14 on: there the sum is rounded to them.
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - (141 << 23)
    code = tl.where(size < (121 << 23), small, tl.minimum(normal, 0x7E))
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.int8)
