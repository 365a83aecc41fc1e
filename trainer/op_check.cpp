#include "trainer/op_check.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include <fmt/core.h>

#include "core/error.h"
#include "reference/view.h"
#include "trainer/cpu/wide.h"

namespace gdn::trainer {

namespace {

bool is_float(DType d) { return d == DType::BF16 || d == DType::FP32; }

std::int64_t extent(const View& v) { return (v.rows - 1) * v.stride + v.cols; } // elements from the first to the last

double element(const std::byte* data, DType dtype, std::int64_t i) {
  return reference::ConstValues(data, dtype, 1, i + 1, i + 1).get(i);
}

// Host copies of the buffers that one call touches, before it runs: as they are, in double and, for a rule, in double
// once more, for what a sound bf16 kernel makes of them.
class Copies {
public:
  Copies(Device& device, const OpCall& call) {
    for (const OpCall::Operand& o : call.operands()) include(o.buffer, call.view_of(o));
    for (size_t i = 0; i < call.op().params.size(); ++i) {
      const std::int64_t n = call.op().params[i].elements;
      const View value = call.param(i, 1, n);
      include(value.data, value);
      if (const View g = gradient(call, i)) include(g.data, g);
    }
    for (auto& [at, c] : copies_) {
      c.own.resize(static_cast<size_t>(c.elements * size_of(c.dtype)));
      device.to_host(c.own.data(), at, static_cast<Bytes>(c.own.size()));
      if (!is_float(c.dtype)) {
        c.wide = c.own;
        continue;
      }
      c.wide.resize(static_cast<size_t>(c.elements) * sizeof(double));
      for (std::int64_t i = 0; i < c.elements; ++i) {
        const double x = element(c.own.data(), c.dtype, i);
        std::memcpy(c.wide.data() + static_cast<size_t>(i) * sizeof(double), &x, sizeof(double));
      }
    }
  }

  static View gradient(const OpCall& call, size_t parameter) {
    if (call.step() < 0) return {};
    const auto& written = call.backward_step().param_grads;
    if (std::find(written.begin(), written.end(), static_cast<int>(parameter)) == written.end()) return {};
    return call.param_grad(parameter, 1, call.op().params[parameter].elements);
  }

  std::byte* own(const std::byte* at) {
    auto& [begin, c] = find(at);
    return c.own.data() + (at - begin);
  }
  std::byte* wide(const std::byte* at) { return beside(at, &Copy::wide); }
  std::byte* rounded(const std::byte* at) { return beside(at, &Copy::rounded); }
  void copy_for_rounded_rule() {
    for (auto& [at, c] : copies_) c.rounded = c.wide;
  }

private:
  struct Copy {
    DType dtype = DType::BF16;
    std::int64_t elements = 0;
    std::vector<std::byte> own = {}, wide = {}, rounded = {};
  };
  std::byte* beside(const std::byte* at, std::vector<std::byte> Copy::*copy) {
    auto& [begin, c] = find(at);
    return (c.*copy).data() + (is_float(c.dtype) ? (at - begin) / size_of(c.dtype) * size_of(DType::FP64) : at - begin);
  }
  void include(const std::byte* begin, const View& v) {
    Copy& c = copies_[begin];
    c.dtype = v.dtype;
    c.elements = std::max(c.elements, (v.data - begin) / size_of(v.dtype) + extent(v));
  }
  std::pair<const std::byte* const, Copy>& find(const std::byte* at) {
    auto after = copies_.upper_bound(at);
    if (after == copies_.begin()) throw Error(ErrorCode::Internal, "an operand lies in no buffer of its call");
    return *std::prev(after);
  }
  std::map<const std::byte*, Copy> copies_;
};

struct Errors {
  double device = 0, reference = 0; // relative L2
};

Errors compare(Device& device, Copies& copies, bool rounded_rule, const View& v) {
  std::vector<std::byte> found(static_cast<size_t>(extent(v) * size_of(v.dtype)));
  device.to_host(found.data(), v.data, static_cast<Bytes>(found.size()));
  const std::byte *wide = copies.wide(v.data), *reference = rounded_rule ? copies.rounded(v.data) : copies.own(v.data);
  const DType wide_type = is_float(v.dtype) ? DType::FP64 : v.dtype;
  double device_off = 0, reference_off = 0, norm = 0;
  for (std::int64_t r = 0; r < v.rows; ++r)
    for (std::int64_t c = 0; c < v.cols; ++c) {
      const std::int64_t i = r * v.stride + c;
      const double x = element(found.data(), v.dtype, i), exact = element(wide, wide_type, i);
      const double y = element(reference, rounded_rule ? wide_type : v.dtype, i);
      device_off += (x - exact) * (x - exact);
      reference_off += (y - exact) * (y - exact);
      norm += exact * exact;
    }
  auto ratio = [&](double off) { return off == 0 ? 0 : std::sqrt(off / norm); }; // NaN and infinity stay what they are
  if (is_float(v.dtype)) return {ratio(device_off), ratio(reference_off)};
  return {device_off == 0 ? 0 : std::numeric_limits<double>::infinity(), 0};
}

// A device that keeps a matrix of its own in the tensor A of a rule gets the reference's in the copies, made from the other
// operands: the inverse of I + M, M_ij = beta_i (k_i . k_j) for j < i in a chunk of 64. No decay is in it: the reference
// applies that when it reads A.
void exact_inverse(const OpCall& call, Copies& copies) {
  const auto& attr = call.attr<model::GdnAttr>();
  const View a = call.out(2), beta = call.in(4), keys = attr.normalise ? call.out(4) : call.in(1);
  auto wide = [&](const View& v) { return reference::Values(copies.wide(v.data), DType::FP64, v.rows, v.cols, v.stride); };
  const reference::Values t = wide(a), own(copies.own(a.data), a.dtype, a.rows, a.cols, a.stride), b = wide(beta), k = wide(keys);
  const std::int64_t heads = a.cols / 64, group = heads * attr.key_dim / keys.cols;
  const auto sequences = call.batch().sequences;
  for (size_t s = 0; s + 1 < sequences.size(); ++s)
    for (std::int64_t first = sequences[s]; first < sequences[s + 1]; first += 64)
      for (std::int64_t h = 0; h < heads; ++h) {
        const std::int64_t rows = std::min<std::int64_t>(64, sequences[s + 1] - first);
        for (std::int64_t i = 0; i < rows; ++i) {
          for (std::int64_t j = 0; j < 64; ++j) t.set(first + i, 64 * h + j, i == j);
          for (std::int64_t l = 0; l < i; ++l) {
            double m = 0;
            for (std::int64_t c = h / group * attr.key_dim; c < (h / group + 1) * attr.key_dim; ++c) m += k.get(first + i, c) * k.get(first + l, c);
            m *= b.get(first + i, h);
            for (std::int64_t j = 0; j <= l; ++j) t.add(first + i, 64 * h + j, -m * t.get(first + l, 64 * h + j));
          }
          for (std::int64_t j = 0; j < 64; ++j) own.set(first + i, 64 * h + j, t.get(first + i, 64 * h + j));
        }
      }
}

// A sound bf16 rule that is a tenth off says that the result itself vanished; twice that still tells a result from none.
constexpr double kVanished = 0.2;

} // namespace

double OpCheck::limit(DType storage) { return storage == DType::BF16 ? 2 * 6.7e-3 : 1e-5; }

void OpCheck::run(const OpCall& call) {
  auto [wide, fresh] = wide_.try_emplace(&call.list());
  if (fresh) wide->second = cpu::widened(call.list());
  Copies copies(inner_, call);
  inner_.run(call);
  inner_.synchronise();
  inner_.fetch_host_table(call);
  const bool keeps_n = call.op().kind == model::OpKind::Rule && inner_.rule_keeps_n();
  if (keeps_n && call.step() >= 0) exact_inverse(call, copies);
  const bool rounded_rule = call.op().kind == model::OpKind::Rule && call.list().tensor(call.op().inputs[2]).dtype == DType::BF16;
  if (rounded_rule) {
    copies.copy_for_rounded_rule();
    cpu::run_rounded_rule(call, wide->second, [&](const std::byte* at, DType) { return copies.rounded(at); });
  } else {
    cpu::run_elsewhere(call, call.list(), [&](const std::byte* at, DType) { return copies.own(at); });
  }
  cpu::run_elsewhere(call, wide->second, [&](const std::byte* at, DType) { return copies.wide(at); });

  DType storage = DType::FP32;
  for (const OpCall::Operand& o : call.operands())
    if (call.list().tensor(o.access.tensor).dtype == DType::BF16) storage = DType::BF16;
  const double rounding = storage == DType::BF16 ? 0x1p-8 : 1e-6;
  OpError& worst = worst_[fmt::format("{}: {}", call.list().name, call.name())];
  if (worst.runs++ == 0) {
    worst.op = fmt::format("{}: {}", call.list().name, call.name());
    worst.kind = call.op().kind;
    worst.allowed = limit(storage);
  }
  auto note = [&](std::string tensor, const View& v) {
    const Errors e = compare(inner_, copies, rounded_rule, v);
    const bool rule = call.op().kind == model::OpKind::Rule || call.op().kind == model::OpKind::Gdn2Rule;
    const double allowed = rounded_rule ? std::clamp(2 * e.reference, limit(storage), kVanished)
                           : rule       ? limit(storage)
                                        : std::min(limit(storage), std::max(2 * e.reference, rounding));
    const double share = e.device / allowed, worst_share = worst.error / worst.allowed;
    if (std::isnan(worst_share) || share < worst_share) return; // NaN is worse than anything
    worst.tensor = std::move(tensor);
    worst.error = e.device;
    worst.reference = e.reference;
    worst.allowed = allowed;
  };
  for (const OpCall::Operand& o : call.operands())
    if (o.access.mode != program::AccessMode::Read && !(keeps_n && o.access.tensor == call.op().outputs[2]))
      note((o.access.gradient ? "d:" : "") + call.list().tensor(o.access.tensor).name, call.view_of(o));
  for (size_t i = 0; i < call.op().params.size(); ++i)
    if (const View g = Copies::gradient(call, i)) note("d:" + call.op().params[i].name, g);
}

std::vector<OpError> OpCheck::results() const {
  std::vector<OpError> out;
  for (const auto& [op, e] : worst_) out.push_back(e);
  std::stable_sort(out.begin(), out.end(), [](const OpError& a, const OpError& b) {
    return a.kind != b.kind ? a.kind < b.kind : a.error > b.error;
  });
  return out;
}

void add_to(report::Document& d, const std::vector<OpError>& results) {
  using report::Align;
  using report::Tone;
  report::Table t{"ops", {{"kind"}, {"op", Align::Left, true}, {"worst tensor"}, {"off by", Align::Right}, {"CPU", Align::Right}, {"allowed", Align::Right}, {""}}};
  for (const OpError& e : results)
    t.rows.push_back({std::string(model::name_of(e.kind)), e.op, e.tensor, fmt::format("{:.1e}", e.error), fmt::format("{:.1e}", e.reference),
                      fmt::format("{:.1e}", e.allowed), e.ok() ? report::Cell("ok", Tone::Good) : report::Cell("MISMATCH", Tone::Bad)});
  d.table(std::move(t));
}

} // namespace gdn::trainer
