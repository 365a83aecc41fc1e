#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "core/category.h"
#include "core/dtype.h"
#include "core/units.h"

// The one description of the work: a list of ops over named tensors, with their backward steps.
// What is kept, freed, replayed, allocated and timed is derived from it (src/program, src/cost).
namespace gdn::model {

using TensorId = int;  // index into OpList::tensors
using StorageId = int; // index into OpList::storages

// ---------------------------------------------------------------------------------- op kinds ----

// Semantics of every kind live in one builder (src/model/kinds/*.h), its CPU functions in
// src/reference, its CUDA launchers in kernels/.
enum class OpKind {
  // plumbing
  Data,           // produces token ids or labels; no backward
  View,           // outputs are views of the input; backward `cat` assembles the gradient
  Copy,           // contiguous copy of a (strided) input
  ResidualAdd,    // out = x + y; gradients are aliases of d:out
  AllToAll,       // sequence <-> head exchange of context parallelism
  AllGather, ReduceScatter, AllReduce,
  // norms and linears
  RmsNorm, Linear,
  // gated delta net
  ConvSilu,       // causal depthwise conv1d + SiLU in one kernel; saves its input only
  Conv,           // the same without the activation (deterministic mode)
  Silu,
  L2Norm,         // q|k, per head
  ExpandHeads,    // repeat Hk heads to Hv
  Gates,          // g = -exp(A_log) softplus(alpha + dt_bias), beta = sigmoid(b)
  Rule,           // chunked gated delta rule
  Gdn2Gates, Gdn2Rule,
  GatedNorm,      // RMSNorm over dv times silu(z)
  GdnPre,         // native: conv + SiLU + q/k L2 norm + gates fused
  // attention
  HeadNorm,       // per-head RMSNorm of q or k
  Rope, CoreAttention, OutputGate,
  // mixture of experts and dense MLP
  Router, Permute, Dispatch, GroupedLinear, SwiGluProb, CombineDispatch, Unpermute, SwiGlu,
  SharedGate,
  // ends of the model
  Embedding, Concat, LmHead, CrossEntropy, LinearCrossEntropy, LossSum,
  // native: fused front ends and compact routing ([T, k] instead of [T, E])
  Gdn2Pre, AttentionPre, TopK, RouterLoss, Sort, Gather, SharedScore,
  // toy kind for tests of the engine: any inputs, any outputs
  Toy
};

std::string_view name_of(OpKind kind);

// ------------------------------------------------------------------------------- attributes ----

struct NormAttr {
  double eps = 1e-6;
  bool zero_centred = true;  // weight applied as 1 + w
  std::int64_t group = 0;    // columns normalised together (head_dim of per-head norms); 0: the whole row
};

enum class TensorParallel { None, Column, Row };

struct LinearAttr {
  TensorParallel mode = TensorParallel::None;
  std::int64_t tp = 1;
  bool sequence_parallel = false; // Column: input is gathered; Row: output is reduce-scattered
  bool bias = false;
};

// Head counts are those of this rank.
struct GdnAttr {
  std::int64_t key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0, kernel = 4;
  bool conv_bias = false;
  bool normalise = false;           // the op normalises q and k itself (in-kernel L2 norm)
  bool grouped = false;             // q and k enter at Hk heads; false: already expanded to Hv
  bool negative_eigenvalues = false;
  bool deterministic = false;       // plain chunked form under autograd (Megatron's fallback)
  double eps = 1e-6;
  bool compiled = true;             // false: gates and gated norm run op by op and keep fp32 intermediates
  std::int64_t chunks = 0;          // of 64 tokens, over all sequences of this rank; each starts a new one
  std::int64_t sequences = 0;       // of this rank: at most so many
};

enum class QkNorm { None, PerHead, WholeVector };

struct AttentionAttr {
  std::int64_t heads = 0, kv_heads = 0, head_dim = 0, rotary_dim = 0;
  double theta = 1e7;
  bool causal = true;
  std::int64_t seq = 0;      // keys a query can see (its sequence's length)
  bool fused = true;         // flash-style core; false: scores and probabilities are tensors
  double dropout = 0;
  std::int64_t sequences = 0; // of a micro-batch: at most so many
  // Read by AttentionPre alone, which normalises q and k itself.
  QkNorm qk_norm = QkNorm::None;
  double eps = 1e-6;
  bool zero_centred = true;
};

struct MoeAttr {
  std::int64_t experts = 0, local_experts = 0, top_k = 0, ffn = 0;
  bool renormalise = true, sigmoid = false, forced_balance = false;
  double aux_coeff = 0, z_coeff = 0;
  std::int64_t capacity = 0; // Sort: rows of every expert, padded; 0: as many as were routed
};

// What the cross entropy keeps for its backward.
enum class LossForm {
  Softmax,   // the fp32 softmax, turned into the gradient in backward
  Overwrite, // the gradient, written over the logits in forward
  Logits     // the logits themselves and one log-sum-exp a row
};

struct LossAttr {
  std::int64_t vocab = 0;  // this rank's rows of the vocabulary
  std::int64_t chunk = 0;  // tokens a chunk (LinearCrossEntropy)
  LossForm form = LossForm::Softmax;
  bool fused = false;      // one compiled function instead of separate ops: its time, nothing it keeps
};

struct RowsAttr {          // Concat: where each input's columns go; Embedding, Data: nothing used
  std::int64_t width = 0;
};

// AllGather of linear_qkv's columns where `replicas` ranks share a query group: its columns, and in them the
// `query` ones at 0 and at gate_at (0: no gates) that are this rank's, come before those of the others.
struct SharedGroupAttr {
  std::int64_t width = 0, replicas = 1, query = 0, gate_at = 0;
};

using Attributes = std::variant<std::monostate, NormAttr, LinearAttr, GdnAttr, AttentionAttr, MoeAttr,
                                LossAttr, RowsAttr, SharedGroupAttr>;

// ---------------------------------------------------------------------------------- tensors ----

// An allocation. `bytes` is what the program reserves for it.
struct Storage {
  std::string name;
  Bytes bytes = 0;
  Category category = Category::Activations; // Activations here means: decided by lifetime
  bool external = false; // held by the caller whatever this list does (a module's input alone)
};

// How the gradient of a tensor is stored when several tensors share a storage.
enum class GradientStorage {
  Own,      // its own buffer (Megatron: views are assembled by a `cat` step)
  Slice,    // the same slice of the gradient of its storage's first tensor (native)
  Overwrite // the tensor's own storage: the gradient was written over it in forward (fused loss)
};

// storage + offset + shape; the first dimension has a stride, inner dimensions are contiguous.
struct Tensor {
  std::string name;
  DType dtype = DType::BF16;
  std::vector<std::int64_t> shape;
  StorageId storage = -1;
  std::int64_t offset = 0;      // elements
  std::int64_t row_stride = 0;  // elements between rows
  TensorId base = -1;           // the tensor this one is a view of
  GradientStorage gradient = GradientStorage::Own;
  bool differentiable = true;   // false: ids, statistics, maps

  std::int64_t rows() const { return shape.empty() ? 1 : shape[0]; }
  std::int64_t cols() const {
    std::int64_t n = 1;
    for (size_t i = 1; i < shape.size(); ++i) n *= shape[i];
    return n;
  }
  std::int64_t elements() const { return rows() * cols(); }
  Bytes bytes() const { return elements() * size_of(dtype); }
};

// -------------------------------------------------------------------------------------- ops ----

// A parameter the op reads: the layer-relative canonical name of the parameter table
// ("gdn.in_proj"), the elements this rank holds.
struct ParamRef {
  std::string name;
  std::int64_t elements = 0;
  DType dtype = DType::BF16;
  bool trainable = true;
};

enum class CollectiveKind { AllReduce, AllGather, ReduceScatter, AllToAll, P2p };
enum class Group { Tp, Cp, Ep, Etp, Dp, Edp, Pp };
std::string_view name_of(CollectiveKind kind); // "all_gather", ... as in hardware profiles
std::string_view name_of(Group group);

// `bytes` is what one rank contributes in full: the gathered size of an all-gather, the input size
// of a reduce-scatter, all-reduce or all-to-all.
struct Collective {
  CollectiveKind kind = CollectiveKind::AllReduce;
  Group group = Group::Tp;
  std::int64_t ranks = 1;
  Bytes bytes = 0;
};

// Products of an op in low precision (fp8 and fp4 recipes). `bits`: 8 or 4, of both operands; 0: in the tensors' own
// dtype. `traffic`: bytes that quantising one value moves, its copies included.
struct LowPrecision {
  int bits = 0;
  double traffic = 0;
};

// One backward step. The saved set of a layer is the union of what existing steps read.
struct Step {
  std::string name;                     // "dgrad", "wgrad", "backward", "cat"
  std::vector<TensorId> reads = {};     // forward tensors and forward-made statistics
  std::vector<TensorId> grad_reads = {};  // t: reads d:t
  std::vector<TensorId> grad_writes = {}; // t: writes (first) or accumulates (later) d:t
  std::vector<int> param_grads = {};      // indices into Op::params; always accumulate
  std::vector<Collective> collectives = {};
};

// What a stack holds without reading it, until the op's backward is done.
struct Pin {
  TensorId tensor = -1;
  std::string reason;
};

struct Op {
  std::string name;                 // unique in the list
  OpKind kind = OpKind::Toy;
  Attributes attr = {};
  std::vector<TensorId> inputs = {}, outputs = {};
  std::vector<ParamRef> params = {};
  std::vector<Step> steps = {};     // in execution order of the backward pass
  std::vector<Pin> pins = {};
  std::vector<Collective> collectives = {}; // of the forward
  // d:input is the same buffer as d:output (residual add, reshape): nothing runs.
  struct GradAlias { TensorId input, output; };
  std::vector<GradAlias> grad_aliases = {};
  LowPrecision low = {};
  Flops model_flops = 0;            // forward, by the published formula (MFU); recompute never counts
  bool effects = false;             // load counters, logging: acts in the forward pass only
};

// -------------------------------------------------------------------------------- holders ----

enum class HoldKind {
  Frame,       // a Python local: until op `until` has run, in the pass that made it
  Caller,      // a module's output held by its caller until the end of the module's backward
  NextForward  // an attribute overwritten by the op's next run (any micro-batch)
};

struct Hold {
  TensorId tensor = -1;
  HoldKind kind = HoldKind::Frame;
  int until = -1; // op index, Frame only
};

// ---------------------------------------------------------------------------------- the list ----

// One unit of composition: a layer, several layers under one span, or an end of the model.
// Units meet only in `input` (the residual stream) and its gradient.
struct OpList {
  std::string name;                // "gdn.moe"
  std::vector<Storage> storages = {};
  std::vector<Tensor> tensors = {};
  std::vector<Op> ops = {};
  std::vector<Hold> holds = {};
  TensorId input = -1;             // -1: the unit starts from data
  TensorId output = -1;            // -1: the unit ends in the loss
  std::int64_t tokens = 0;         // this rank's tokens (per-token figures)

  const Tensor& tensor(TensorId id) const { return tensors[static_cast<size_t>(id)]; }
  const Storage& storage_of(TensorId id) const {
    return storages[static_cast<size_t>(tensor(id).storage)];
  }
  int find_op(std::string_view op_name) const; // -1 when absent
  TensorId find_tensor(std::string_view tensor_name) const;
  int producer(TensorId id) const;             // op index, -1 for inputs; views answer their base's
};

// Checks the rules a list must obey: unique names, inputs produced before use, steps that only read
// and write tensors the op touches or declares, views inside their storage, the output unread by
// its own unit's backward. Throws Error{Internal} naming list, op and tensor.
void verify(const OpList& list);

} // namespace gdn::model
