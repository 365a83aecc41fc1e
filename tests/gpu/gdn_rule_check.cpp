// The gated delta rule's kernels against the token recurrence in fp64, on adversarial inputs.
//   gdn_rule_check            all cases
//   gdn_rule_check quick      the first cases only (for the memory and race checkers)
//   gdn_rule_check stages     intermediates of one case, to see where an error starts
#include <cstdio>
#include <cstring>

#include "core/error.h"
#include "kernels/gdn/rule_sizes.h"
#include "tests/gpu/rule_rounded.h"
#include "tests/gpu/rule_runner.h"

using namespace gdn;
using namespace gdn::gpu_test;

namespace {

enum class Decay { kNone, kMilli, kOne, kTwenty, kEightyEight, kMixed, kSpike, kQuadratic };
enum class Beta { kZero, kTiny, kUnit, kOne, kDouble, kTwo };
enum class Keys { kRandom, kSame, kAlternating, kPeriod4, kCosine, kZeroRows, kSmallRows };

const char* const kDecayNames[] = {"0", "-1e-3", "-1", "-20", "-88", "mix", "spike", "-3u2"};
const char* const kBetaNames[] = {"0", "1e-8", "U(0,1)", "1", "U(0,2)", "2"};
const char* const kKeyNames[] = {"random",  "same",      "+-",        "period 4",
                                 "cos 0.8", "zero rows", "small rows"};

struct Case {
  std::vector<int> lengths;
  int key_heads = 1, group = 1;
  Decay decay = Decay::kQuadratic;
  Beta beta = Beta::kUnit;
  Keys keys = Keys::kRandom;
  int key_dim = 128, value_dim = 128;
  bool l2_norm = false;
  bool initial = false, d_final = false;
  double initial_size = 1;
  int padding = 0;
  Placement placement = Placement::kPacked;
  bool no_d_o = false;
};

double rounded(double x) { return value(to_bf16(static_cast<float>(x))); }

RuleProblem make_problem(const Case& c, std::uint64_t seed) {
  Random random{seed * 1000003};
  RuleProblem p;
  p.lengths = c.lengths;
  p.padding = c.padding;
  p.key_heads = c.key_heads;
  p.group = c.group;
  p.key_dim = c.key_dim;
  p.value_dim = c.value_dim;
  p.scale = static_cast<float>(1 / std::sqrt(c.key_dim));
  p.epsilon = 1e-6f;
  p.l2_norm = c.l2_norm;
  const int n = p.tokens(), hv = p.value_heads(), K = c.key_dim, V = c.value_dim;
  auto fill = [&](std::vector<double>& x, std::size_t count, double size) {
    x.resize(count);
    for (auto& y : x) y = rounded(size * random.normal());
  };
  fill(p.q, std::size_t(n) * c.key_heads * K, 1);
  fill(p.k, std::size_t(n) * c.key_heads * K, 1);
  fill(p.v, std::size_t(n) * hv * V, 1);
  fill(p.d_o, std::size_t(n) * hv * V, c.no_d_o ? 0 : 1);
  for (int h = 0; h < c.key_heads; ++h) {
    std::vector<double> base(4 * K);
    for (auto& y : base) y = random.normal();
    for (int t = 0; t < n; ++t) {
      double* k = &p.k[(std::size_t(t) * c.key_heads + h) * K];
      for (int i = 0; i < K; ++i) {
        if (c.keys == Keys::kSame) k[i] = base[i];
        if (c.keys == Keys::kAlternating) k[i] = t % 2 ? -base[i] : base[i];
        if (c.keys == Keys::kPeriod4) k[i] = base[t % 4 * K + i];
        if (c.keys == Keys::kCosine) k[i] = std::sqrt(0.8) * base[i] + std::sqrt(0.2) * k[i];
        if (c.keys == Keys::kZeroRows && t % 3 == 1) k[i] = 0;
        if (c.keys == Keys::kSmallRows && t % 3 == 1) k[i] *= 1e-4 / std::sqrt(K);
      }
    }
  }
  if (!c.l2_norm) // unit rows, then rounded, as a caller that normalises would hand them over
    for (auto* x : {&p.q, &p.k})
      for (std::size_t row = 0; row < x->size(); row += K) {
        double sum = 1e-12;
        for (int i = 0; i < K; ++i) sum += (*x)[row + i] * (*x)[row + i];
        const double rho = sum < 1e-3 ? 1 : 1 / std::sqrt(sum);
        for (int i = 0; i < K; ++i) (*x)[row + i] *= rho;
      }
  for (auto* x : {&p.q, &p.k})
    for (auto& y : *x) y = rounded(y);
  p.g.resize(std::size_t(n) * hv);
  p.beta.resize(p.g.size());
  for (std::size_t i = 0; i < p.g.size(); ++i) {
    const double u = random.uniform(), b = random.uniform();
    const double mixed[] = {0, -20, -0.01};
    switch (c.decay) {
    case Decay::kNone: p.g[i] = 0; break;
    case Decay::kMilli: p.g[i] = -1e-3; break;
    case Decay::kOne: p.g[i] = -1; break;
    case Decay::kTwenty: p.g[i] = -20; break;
    case Decay::kEightyEight: p.g[i] = -88; break;
    case Decay::kMixed: p.g[i] = mixed[static_cast<int>(3 * u)]; break;
    case Decay::kSpike: p.g[i] = i / hv % 64 == 21 ? -1000 : 0; break;
    case Decay::kQuadratic: p.g[i] = -3 * u * u; break;
    }
    switch (c.beta) {
    case Beta::kZero: p.beta[i] = 0; break;
    case Beta::kTiny: p.beta[i] = 1e-8; break;
    case Beta::kUnit: p.beta[i] = b; break;
    case Beta::kOne: p.beta[i] = 1; break;
    case Beta::kDouble: p.beta[i] = 2 * b; break;
    case Beta::kTwo: p.beta[i] = 2; break;
    }
    p.g[i] = static_cast<float>(p.g[i]);
    p.beta[i] = static_cast<float>(p.beta[i]);
  }
  const std::size_t states = std::size_t(p.sequences()) * hv * K * V;
  auto fill_states = [&](std::vector<double>& x, double size) {
    x.resize(states);
    for (auto& y : x) y = static_cast<float>(size * random.normal());
  };
  if (c.initial) fill_states(p.initial, c.initial_size);
  if (c.d_final) fill_states(p.d_final, 1);
  return p;
}

// Expected relative L2 errors of bf16 kernels, unit 1e-3: o, S_final, dq, dk, dv, dbeta, dS_init,
// from a simulation of 512 tokens with bf16 operands and fp32 accumulation, by decay and range of
// beta.
struct Expected {
  double o, final_state, dq, dk, dv, dbeta, d_initial;
};
Expected expected(const Case& c) {
  if (c.beta == Beta::kDouble || c.beta == Beta::kTwo) return {5.5, 5.7, 5.6, 6.7, 4.6, 6.3, 4.7};
  switch (c.decay) {
  case Decay::kNone:
  case Decay::kMilli:
  case Decay::kSpike: return {4.2, 3.8, 4.3, 4.6, 3.5, 3.8, 2.2};
  case Decay::kMixed: return {3.3, 2.9, 3.3, 3.3, 2.9, 2.6, 1.6};
  default: return {3.2, 3.3, 3.3, 3.3, 2.9, 2.3, 1.7};
  }
}

// |x - want| / max(|want|, |scale|), infinite when not a number; 0 / 0 is 0.
double relative(const std::vector<double>& x, const std::vector<double>& want,
                const std::vector<double>& scale = {}) {
  double error = 0, size = 0, other = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    error += (x[i] - want[i]) * (x[i] - want[i]);
    size += want[i] * want[i];
    if (!scale.empty()) other += scale[i] * scale[i];
  }
  if (!(error > 0)) return std::isnan(error) ? INFINITY : 0;
  return std::sqrt(error / std::max({size, other, 1e-60}));
}

// 90th percentile of |x - want| / scale where scale > 1e-30.
double percentile90(const std::vector<double>& x, const std::vector<double>& want,
                    const std::vector<double>& scale) {
  std::vector<double> errors;
  for (std::size_t i = 0; i < want.size(); ++i)
    if (scale[i] > 1e-30) errors.push_back(std::abs(x[i] - want[i]) / scale[i]);
  if (errors.empty()) return 0;
  std::sort(errors.begin(), errors.end());
  return errors[errors.size() * 9 / 10];
}

bool same_bits(const RuleResult& a, const RuleResult& b) {
  const auto equal = [](const std::vector<double>& x, const std::vector<double>& y) {
    return x.size() == y.size() && std::memcmp(x.data(), y.data(), x.size() * 8) == 0;
  };
  return equal(a.o, b.o) && equal(a.final_state, b.final_state) && equal(a.dq, b.dq) &&
         equal(a.dk, b.dk) && equal(a.dv, b.dv) && equal(a.dg, b.dg) && equal(a.dbeta, b.dbeta) &&
         equal(a.d_initial, b.d_initial);
}

std::string describe(const Case& c) {
  std::string lengths;
  for (std::size_t i = 0; i < c.lengths.size() && i < 8; ++i)
    lengths += (i ? "," : "") + std::to_string(c.lengths[i]);
  if (c.lengths.size() > 8) lengths += ",..";
  char text[200];
  std::snprintf(text, sizeof text, "%-22s %d/%d g=%s b=%s k=%s %d/%d%s%s%s%s", lengths.c_str(),
                c.key_heads, c.key_heads * c.group, kDecayNames[int(c.decay)],
                kBetaNames[int(c.beta)], kKeyNames[int(c.keys)], c.key_dim, c.value_dim,
                c.l2_norm ? " l2" : "", c.initial ? " S0" : "", c.d_final ? " dS" : "",
                c.placement == Placement::kPacked      ? ""
                : c.placement == Placement::kProjected ? " sliced"
                                                       : " head-major");
  return text;
}

RuleResult run(RuleRunner& runner) {
  runner.poison();
  runner.make_table(nullptr);
  runner.forward(nullptr);
  runner.backward(nullptr);
  GDN_CUDA(cudaDeviceSynchronize());
  return runner.results();
}

bool check(const Case& c, std::uint64_t seed) {
  const RuleProblem p = make_problem(c, seed);
  RuleRunner runner(p, c.placement);
  const RuleResult got = run(runner), again = run(runner);
  const RuleResult want = rule_oracle(p), sound = rule_rounded(p);
  const Expected e = expected(c);
  struct Row {
    const char* name;
    double error, limit;
  };
  // At most twice (states: three times) the larger of the table and of the same inputs' error in a
  // sound bf16 computation; the gate gradient also element by element.
  auto row = [&](const char* name, std::vector<double> RuleResult::*field, double table,
                 double factor, const std::vector<double>& scale = {}) {
    const double allowed = std::max(1e-3 * table, relative(sound.*field, want.*field, scale));
    return Row{name, relative(got.*field, want.*field, scale), factor * allowed};
  };
  const Row rows[] = {
      row("o", &RuleResult::o, e.o, 2),
      row("S", &RuleResult::final_state, e.final_state, 3),
      row("dq", &RuleResult::dq, e.dq, 2),
      row("dk", &RuleResult::dk, e.dk, 2),
      row("dv", &RuleResult::dv, e.dv, 2),
      row("dg", &RuleResult::dg, 3, 2, want.dg_scale),
      {"dg90", percentile90(got.dg, want.dg, want.dg_scale),
       std::max(5e-2, 2 * percentile90(sound.dg, want.dg, want.dg_scale))},
      row("db", &RuleResult::dbeta, e.dbeta, 2, want.dbeta_scale),
      row("dS", &RuleResult::d_initial, e.d_initial, 3),
  };
  bool ok = true;
  std::string line;
  for (const Row& row : rows) {
    const bool good = row.error <= row.limit;
    ok = ok && good;
    char text[80];
    if (good)
      std::snprintf(text, sizeof text, " %s %.2f", row.name, row.error * 1e3);
    else
      std::snprintf(text, sizeof text, " %s %.2f (limit %.2f)", row.name, row.error * 1e3,
                    row.limit * 1e3);
    line += text;
  }
  if (!same_bits(got, again)) ok = false, line += " NOT REPEATABLE";
  if (!runner.guards_intact()) ok = false, line += " GUARD OVERWRITTEN";
  std::printf("%s %s |%s\n", ok ? "ok  " : "FAIL", describe(c).c_str(), line.c_str());
  std::fflush(stdout);
  return ok;
}

std::vector<Case> cases(bool quick) {
  std::vector<Case> all;
  // Plain shapes first: they say where a broken kernel is broken.
  all.push_back({.lengths = {64}});
  all.push_back({.lengths = {128}, .group = 2, .initial = true, .d_final = true});
  all.push_back({.lengths = {100, 29}, .key_heads = 2, .group = 2, .l2_norm = true, .padding = 7});
  all.push_back(
      {.lengths = {700}, .key_heads = 2, .group = 3, .l2_norm = true}); // rings wrap around
  if (quick) return all;
  // Pairs of lengths, groups, decay, beta, keys: strides that are coprime to the list sizes.
  const std::vector<std::vector<int>> lengths = {
      {1}, {2}, {3}, {4}, {63}, {64}, {65}, {127}, {128}, {129}, {0, 1, 63, 64, 65, 0, 200, 0}};
  for (int i = 0; i < 84; ++i) {
    Case c;
    c.lengths = lengths[i % 11];
    c.key_heads = c.lengths.size() == 1 && c.lengths[0] < 100 ? 8 : 2; // errors are averages
    c.group = 1 + i % 4;
    c.decay = static_cast<Decay>((i + i / 11) % 8);
    c.beta = static_cast<Beta>((i / 2 + i / 7) % 6);
    c.keys = static_cast<Keys>((i / 3) % 7);
    c.initial = i % 3 != 0;
    c.d_final = i % 5 < 2;
    c.l2_norm = i % 4 == 3;
    all.push_back(c);
  }
  all.push_back({.lengths = {512}, .decay = Decay::kNone, .initial = true, .d_final = true});
  all.push_back({.lengths = {512}, .decay = Decay::kNone, .beta = Beta::kDouble, .initial = true});
  all.push_back({.lengths = {512},
                 .key_heads = 4,
                 .decay = Decay::kNone,
                 .beta = Beta::kOne,
                 .keys = Keys::kSame});
  all.push_back({.lengths = {4096}, .group = 2, .l2_norm = true, .initial = true, .d_final = true});
  all.push_back({.lengths = {300}, .key_heads = 16, .group = 2, .l2_norm = true});
  all.push_back(
      {.lengths = {200, 70}, .group = 4, .initial = true, .d_final = true, .initial_size = 1e4});
  all.push_back({.lengths = {200, 70}, .group = 2, .d_final = true, .no_d_o = true});
  all.push_back({.lengths = {130, 61},
                 .key_heads = 2,
                 .group = 2,
                 .l2_norm = true,
                 .padding = 77,
                 .placement = Placement::kProjected});
  all.push_back({.lengths = {130, 61},
                 .key_heads = 2,
                 .group = 2,
                 .padding = 3,
                 .placement = Placement::kHeadMajor});
  for (bool norm : {false, true}) {
    all.push_back({.lengths = {64, 190},
                   .group = 2,
                   .key_dim = 64,
                   .value_dim = 64,
                   .l2_norm = norm,
                   .initial = true,
                   .d_final = true});
    all.push_back({.lengths = {64, 190},
                   .group = 2,
                   .key_dim = 96,
                   .value_dim = 192,
                   .l2_norm = norm,
                   .initial = true,
                   .d_final = true});
    all.push_back({.lengths = {64, 190},
                   .group = 2,
                   .key_dim = 32,
                   .value_dim = 32,
                   .l2_norm = norm,
                   .initial = true,
                   .d_final = true});
    all.push_back({.lengths = {64, 190},
                   .group = 3,
                   .key_dim = 40,
                   .value_dim = 72,
                   .l2_norm = norm,
                   .initial = true,
                   .d_final = true});
  }
  all.push_back({.lengths = {70, 0, 33},
                 .group = 2,
                 .key_dim = 256,
                 .value_dim = 256,
                 .l2_norm = true,
                 .initial = true,
                 .d_final = true,
                 .padding = 5});
  all.push_back(
      {.lengths = {90}, .decay = Decay::kMixed, .key_dim = 256, .value_dim = 512, .initial = true});
  all.push_back({.lengths = {40, 17},
                 .key_heads = 2,
                 .group = 2,
                 .decay = Decay::kTwenty,
                 .key_dim = 200,
                 .value_dim = 24,
                 .d_final = true,
                 .placement = Placement::kProjected});
  Case many;
  for (int i = 0; i < 4096; ++i) many.lengths.push_back(1 + i % 8);
  all.push_back(many);
  return all;
}

// Z, E, S and dS of one case against the recurrence, decoded from the scratch images.
int check_stages() {
  const Case c{
      .lengths = {150}, .group = 2, .decay = Decay::kQuadratic, .initial = true, .d_final = true};
  const RuleProblem p = make_problem(c, 5);
  RuleRunner runner(p);
  const RuleResult got = run(runner), want = rule_oracle(p);
  const auto scratch = runner.scratch().download();
  const auto at = kernels::rule_scratch(runner.shape(), true);
  auto element = [&](std::int64_t image, int row, int column) { // of a swizzled 64-wide tile
    const std::int64_t offset =
        image + row * 128 + (((column / 8) ^ (row & 7)) << 4) + column % 8 * 2;
    Bf16 x;
    std::memcpy(&x, scratch.data() + offset, 2);
    return value(x);
  };
  const int hv = p.value_heads(), V = p.value_dim;
  for (int head = 0; head < hv; ++head)
    for (int chunk = 0; chunk < 3; ++chunk) {
      double errors[2] = {}, sizes[2] = {};
      for (int i = 0; i < 64 && chunk * 64 + i < 150; ++i)
        for (int j = 0; j < V; ++j) {
          const std::int64_t image = ((std::int64_t(chunk) * hv + head) * 2 + j / 64) * 8192;
          const std::size_t index = (std::size_t(chunk * 64 + i) * hv + head) * V + j;
          const double z = element(at.z + image, i, j % 64) - want.z[index];
          const double e = element(at.e + image, i, j % 64) - want.e[index];
          errors[0] += z * z, sizes[0] += want.z[index] * want.z[index];
          errors[1] += e * e, sizes[1] += want.e[index] * want.e[index];
        }
      double first = 0, first_size = 0;
      if (chunk == 0)
        for (int i = 0; i < 128; ++i)
          for (int j = 0; j < V; ++j) {
            const std::int64_t image = (std::int64_t(head) * 2 + j / 64) * 16384 + i / 64 * 8192;
            const double s = p.initial[(std::size_t(head) * 128 + i) * V + j];
            const double d = element(at.states + image, j % 64, i % 64) - s;
            first += d * d, first_size += s * s;
          }
      std::printf("head %d chunk %d: z %.2e e %.2e", head, chunk, std::sqrt(errors[0] / sizes[0]),
                  std::sqrt(errors[1] / sizes[1]));
      if (chunk == 0) std::printf(" S0 %.2e", std::sqrt(first / first_size));
      std::printf("\n");
    }
  std::printf("o %.2e dq %.2e dk %.2e dv %.2e dg %.2e db %.2e\n", relative(got.o, want.o),
              relative(got.dq, want.dq), relative(got.dk, want.dk), relative(got.dv, want.dv),
              relative(got.dg, want.dg), relative(got.dbeta, want.dbeta));
  return 0;
}

} // namespace

int main(int argc, char** argv) try {
  if (!have_device()) return kSkip;
  if (argc > 1 && std::strcmp(argv[1], "stages") == 0) return check_stages();
  const bool quick = argc > 1 && std::strcmp(argv[1], "quick") == 0;
  std::printf("relative L2 error x 1000 against fp64\n");
  int failures = 0, index = 0;
  const auto all = cases(quick);
  for (const Case& c : all) failures += !check(c, ++index);
  std::printf("%zu cases, %d failures\n", all.size(), failures);
  return failures ? 5 : 0;
} catch (const Error& error) {
  std::printf("error: %s\n", error.what());
  return 1;
}
