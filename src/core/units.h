#pragma once
#include <compare>
#include <cstdint>
#include <string>
#include <string_view>

namespace gdn {

// Plain arithmetic types with a name: sizes are exact integers, rates and times are doubles.
using Bytes = std::int64_t;      // bytes
using Flops = double;            // floating-point operations (a multiply-add counts two)
using Seconds = double;          // s
using BytesPerSecond = double;   // B/s
using FlopsPerSecond = double;   // FLOP/s

inline constexpr Bytes kKiB = Bytes{1} << 10;
inline constexpr Bytes kMiB = Bytes{1} << 20;
inline constexpr Bytes kGiB = Bytes{1} << 30;

// a * b and a + b, throwing Error{Config} ("size overflows 64 bits") instead of wrapping.
std::int64_t checked_mul(std::int64_t a, std::int64_t b);
std::int64_t checked_add(std::int64_t a, std::int64_t b);
// ceil(a / b) for b > 0 and a >= 0.
std::int64_t ceil_div(std::int64_t a, std::int64_t b);
std::int64_t round_up(std::int64_t a, std::int64_t multiple);

// "130GiB", "80GB", "80g", "1.5 MiB", "4096" -> bytes. Every prefix is a power of 1024, as the help
// says. Throws Error{Usage} naming `what` and the text.
Bytes parse_bytes(std::string_view text, std::string_view what);

std::string format_gib(Bytes bytes, int decimals = 2);      // "12.34 GiB"
std::string format_bytes(Bytes bytes);                      // "12.3 MiB", unit by size
std::string format_count(std::int64_t n);                   // "86,592"
std::string format_seconds(Seconds s);                      // "412 ms", "1.25 s", "38 us"

} // namespace gdn
