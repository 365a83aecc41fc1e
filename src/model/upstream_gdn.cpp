#include "model/upstream.h"

namespace gdn::model::upstream {

// FLA's kernel; backward leaves fp32 partial weight gradients, one [C, K] a block of 64 rows.
Work conv(const OpList& list, const Op& op, int step) {
  if (is_forward(step)) return memory_bound(list, op, step, Family::Conv);
  const GdnAttr& a = std::get<GdnAttr>(op.attr);
  const Tensor& x = list.tensor(op.inputs[0]);
  const Bytes partial = ceil_div(x.rows(), 64) * x.cols() * a.kernel * 4;
  Work w = memory_bound(list, op, step, Family::Conv, partial, 2);
  w.traffic += 2 * partial;
  return w;
}

// FLA needs q|k contiguous: a copy first, then the norm.
Work l2_norm(const OpList& list, const Op& op, int step) {
  if (!is_forward(step)) return memory_bound(list, op, step, Family::Norm);
  return memory_bound(list, op, step, Family::Norm, list.tensor(op.inputs[0]).bytes(), 2, 2);
}

namespace {

// Sizes of one token and head, and how many there are.
struct RuleSize {
  double token_heads;
  std::int64_t rows, heads, chunks, key_row, value_row; // rows: head count times head dim
  double key_block, value_block, state;                 // FLOPs: C x C x dk, C x C x dv, C x dk x dv, by token
  Bytes key, value, inverse, states;                    // bytes of k, v, the 64-wide matrix and the chunk state
};

RuleSize size_of_rule(const OpList& list, const Op& op) {
  const GdnAttr& a = std::get<GdnAttr>(op.attr);
  const std::int64_t rows = list.tensor(op.inputs[2]).rows(), dk = a.key_dim, dv = a.value_dim;
  const std::int64_t chunks = a.chunks > 0 ? a.chunks : ceil_div(rows, 64);
  return {static_cast<double>(rows * a.value_heads), rows, a.value_heads, chunks, a.value_heads * dk, a.value_heads * dv,
          128.0 * static_cast<double>(dk), 128.0 * static_cast<double>(dv), 2.0 * static_cast<double>(dk * dv),
          2 * dk, 2 * dv, 128, 2 * a.value_heads * dk * dv * chunks};
}

// Megatron's fallback: plain PyTorch in fp32, a loop over 63 rows of the inverse and one over chunks
// [inferred]. Beside the intermediates it keeps, a few [token, head, d] tensors live at a time.
Work plain_rule(const OpList& list, const Op& op, int step) {
  const RuleSize z = size_of_rule(list, op);
  const Bytes row = 4 * z.rows * (z.key_row + z.value_row) / 2;
  const int kernels = static_cast<int>(63 * 5 + 8 * z.chunks + 30);
  return is_forward(step) ? memory_bound(list, op, step, Family::Rule, 3 * row, kernels, 2)
                          : memory_bound(list, op, step, Family::Rule, 6 * row, 2 * kernels, 3);
}

} // namespace

// FLA bc3b101d, chunk_gated_delta_rule with q and k at Hv heads. Traffic kernel by kernel, in the
// order of the launches; k, v: bytes of a token and head, S: its share of the bf16 chunk states.
Work rule(const OpList& list, const Op& op, int step) {
  const GdnAttr& a = std::get<GdnAttr>(op.attr);
  if (a.deterministic) return plain_rule(list, op, step);
  const RuleSize z = size_of_rule(list, op);
  const double k = static_cast<double>(z.key), v = static_cast<double>(z.value), t = static_cast<double>(z.inverse);
  const double s = static_cast<double>(z.states) / z.token_heads;
  const double normalise = a.normalise ? 4 * k + 8 : 0;
  Work w;
  w.family = Family::Rule;
  double flops, traffic;
  if (is_forward(step)) {
    w.scratch = z.rows * (2 * z.key_row + 4 * z.value_row) + z.states; // w; u, v_new; h
    flops = 3 * z.key_block + 2 * z.value_block + 3 * z.state + 8192;   // 8192: the inverse, C^3
    traffic = normalise + 8                       // prefix sum of g
              + k + t + 8                         // k k^T and its inverse
              + 2 * k + 2 * v + t + 8             // w, u
              + 2 * k + 2 * v + s + 4             // states, v_new
              + 2 * k + 2 * v + s + 4;            // output
    w.kernels = a.normalise ? 8 : 6;
  } else {
    w.scratch = z.rows * (6 * z.key_row + 6 * z.value_row + 4 * z.heads) + 2 * z.states; // w, dw, dk2; u, v_new, du; dg2; h, dh
    if (a.key_dim > 128) w.scratch += z.rows * 4 * z.heads * ceil_div(a.key_dim, 128);   // dg by blocks of dk
    flops = 9 * z.key_block + 5 * z.value_block + 8 * z.state + 16384;
    traffic = 1.5 * normalise + 2 * k + 2 * v + t + 8 // w, u again
              + 2 * k + 2 * v + s + 4             // states, v_new again
              + 2 * k + 2 * v + 4                 // local dv
              + 3 * k + 3 * v + s + 4             // reverse scan
              + 5 * k + 3 * v + 2 * s + 8         // dq, dk, dw, dg
              + 3 * k + 3 * v + t + 16            // through the inverse: dk2, dv, db, dg2
              + 3 * k + 50;                       // sums of dk and dg
    w.kernels = a.normalise ? 19 : 17;
  }
  w.flops = flops * z.token_heads;
  w.traffic = static_cast<Bytes>(traffic * z.token_heads);
  w.size = w.flops;
  return w;
}

// g and b are made at Hk heads, then repeated.
Work gdn2_gates(const OpList& list, const Op& op, int step) {
  const Bytes at_key_heads = list.tensor(op.inputs[0]).elements() * (4 + 2);
  return memory_bound(list, op, step, Family::Elementwise, at_key_heads, is_forward(step) ? 4 : 5, 1.5);
}

// FLA's chunk_gdn2 [inferred]: as the scalar rule, with q and k scaled by their channels' decays in
// buffers of their own, and an fp32 gradient of g per channel.
Work gdn2_rule(const OpList& list, const Op& op, int step) {
  const GdnAttr& a = std::get<GdnAttr>(op.attr);
  if (a.deterministic) return plain_rule(list, op, step);
  const RuleSize z = size_of_rule(list, op);
  const double k = static_cast<double>(z.key), v = static_cast<double>(z.value), t = static_cast<double>(z.inverse);
  const double s = static_cast<double>(z.states) / z.token_heads;
  const double gates = 3 * k + v; // g in fp32, b; w
  Work w;
  w.family = Family::Rule;
  double flops, traffic;
  if (is_forward(step)) {
    w.scratch = z.rows * (6 * z.key_row + 4 * z.value_row) + z.states; // w, qg, kg; u, v_new; h
    flops = 4 * z.key_block + 2 * z.value_block + 3 * z.state + 8192;
    traffic = 4 * k + (3 * k + 2 * t) + (5 * k + 2 * v + t) + (4 * k + 2 * v + s) + (3 * k + 2 * v + s) + gates;
    w.kernels = 8;
  } else {
    w.scratch = z.rows * (10 * z.key_row + 6 * z.value_row + 4 * z.key_row) + 2 * z.states; // also qg, kg, dg2
    flops = 12 * z.key_block + 6 * z.value_block + 8 * z.state + 16384;
    traffic = 3 * gates + 24 * k + 16 * v + 4 * t + 5 * s;
    w.kernels = 22;
  }
  w.flops = flops * z.token_heads;
  w.traffic = static_cast<Bytes>(traffic * z.token_heads);
  w.size = w.flops;
  return w;
}

// Where the normalised rows are a tensor, norm and gate are two kernels, and backward makes their
// gradient between them.
Work gated_norm(const OpList& list, const Op& op, int step) {
  const bool two = op.outputs.size() > 2;
  Work w = memory_bound(list, op, step, Family::Norm, !is_forward(step) && two ? list.tensor(op.inputs[0]).bytes() : 0,
                        (two ? 2 : 1) + !is_forward(step));
  if (two) w.traffic += list.tensor(op.inputs[0]).bytes() * (is_forward(step) ? 1 : 2);
  w.size = static_cast<double>(w.traffic);
  return w;
}

} // namespace gdn::model::upstream
