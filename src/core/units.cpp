#include "core/units.h"

#include <cctype>
#include <charconv>
#include <cmath>

#include <fmt/core.h>

#include "core/error.h"

namespace gdn {

std::int64_t checked_mul(std::int64_t a, std::int64_t b) {
  std::int64_t r;
  if (__builtin_mul_overflow(a, b, &r))
    throw Error(ErrorCode::Config, fmt::format("size overflows 64 bits: {} x {}", a, b));
  return r;
}

std::int64_t checked_add(std::int64_t a, std::int64_t b) {
  std::int64_t r;
  if (__builtin_add_overflow(a, b, &r))
    throw Error(ErrorCode::Config, fmt::format("size overflows 64 bits: {} + {}", a, b));
  return r;
}

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return a / b + (a % b != 0); }

std::int64_t round_up(std::int64_t a, std::int64_t multiple) {
  return checked_mul(ceil_div(a, multiple), multiple);
}

Bytes parse_bytes(std::string_view text, std::string_view what) {
  auto fail = [&](const char* why) -> Error {
    return Error(ErrorCode::Usage, fmt::format("{}: '{}' {}", what, text, why),
                 "write a size such as 130GiB, 80GB, 512MiB or a number of bytes "
                 "(every prefix is a power of 1024)");
  };
  double value = 0;
  auto [end, ec] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (ec != std::errc{} || !std::isfinite(value) || value < 0) throw fail("is not a size");
  std::string unit;
  for (const char* c = end; c != text.data() + text.size(); ++c)
    if (!std::isspace(static_cast<unsigned char>(*c)))
      unit += static_cast<char>(std::tolower(static_cast<unsigned char>(*c)));
  if (!unit.empty() && unit.back() == 'b') unit.pop_back();
  if (!unit.empty() && unit.back() == 'i') unit.pop_back();
  constexpr std::string_view kPrefixes = "kmgtp";
  double scale = 1;
  if (unit.size() > 1) throw fail("has an unknown unit");
  if (unit.size() == 1) {
    size_t p = kPrefixes.find(unit[0]);
    if (p == std::string_view::npos) throw fail("has an unknown unit");
    scale = std::ldexp(1.0, 10 * static_cast<int>(p + 1));
  }
  if (value * scale >= 9.2e18) throw fail("is too large");
  return static_cast<Bytes>(std::llround(value * scale));
}

std::string format_gib(Bytes bytes, int decimals) {
  return fmt::format("{:.{}f} GiB", static_cast<double>(bytes) / static_cast<double>(kGiB), decimals);
}

std::string format_bytes(Bytes bytes) {
  double v = static_cast<double>(bytes);
  double a = std::fabs(v);
  if (a >= static_cast<double>(kGiB)) return fmt::format("{:.2f} GiB", v / static_cast<double>(kGiB));
  if (a >= static_cast<double>(kMiB)) return fmt::format("{:.1f} MiB", v / static_cast<double>(kMiB));
  if (a >= static_cast<double>(kKiB)) return fmt::format("{:.1f} KiB", v / static_cast<double>(kKiB));
  return fmt::format("{} B", bytes);
}

std::string format_count(std::int64_t n) {
  std::string digits = fmt::format("{}", n < 0 ? -n : n);
  for (int i = static_cast<int>(digits.size()) - 3; i > 0; i -= 3) digits.insert(static_cast<size_t>(i), ",");
  return n < 0 ? "-" + digits : digits;
}

std::string format_seconds(Seconds s) {
  double a = std::fabs(s);
  if (a >= 1e4) return fmt::format("{:.0f} s", s);
  if (a >= 1) return fmt::format("{:.4g} s", s);
  if (a >= 1e-3) return fmt::format("{:.3g} ms", s * 1e3);
  return fmt::format("{:.3g} us", s * 1e6);
}

} // namespace gdn
