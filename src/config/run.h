#pragma once
#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "config/stack_settings.h"
#include "core/dtype.h"
#include "core/revision.h"
#include "core/units.h"

// How a model is trained: Megatron-LM's settings under Megatron's names, plus what selects the stack.
namespace gdn::config {

enum class Build { Te, Local };                // Transformer Engine fused norms, or separate
enum class L2Norm { Caller, Kernel, Off };     // who normalises q and k
enum class Granularity { None, Selective, Full };
enum class VisionMode { Trained, Frozen, Absent };
enum class CrossEntropy { Unfused, FusedNative, FusedTe, ChunkedLinear };

std::string_view name_of(Build build);             // "te", "local"
std::string_view name_of(L2Norm l2norm);           // "caller", "kernel", "off"
std::string_view name_of(Granularity granularity); // "none", "selective", "full"
std::string_view name_of(VisionMode mode);
std::string_view name_of(CrossEntropy loss);       // "unfused", "native", "te", "chunked"

struct Parallel {
  std::int64_t tp = 1, cp = 1, pp = 1, vp = 1, ep = 1, etp = 1;
  bool sequence_parallel = false;
  std::int64_t gpus = 1;   // world size
  // Layers per virtual stage in model order (pp*vp entries); empty: even split.
  std::vector<std::int64_t> layout = {};
  // decoder_first/last_pipeline_num_layers as given; resolve_layout (run_io.h) turns them into `layout`.
  std::optional<std::int64_t> first_stage_layers = {}, last_stage_layers = {};

  std::int64_t dp() const { return gpus / (tp * cp * pp); }                // data parallel
  std::int64_t edp() const { return gpus / (pp * ep * etp); }              // expert data parallel
};

// A user's or a module's contiguous run of ops priced as a checkpoint (--span NAME=FIRST..LAST[:discard]).
struct UserSpan {
  std::string name, first, last;
  bool discard = false;
};

struct Recompute {
  Granularity granularity = Granularity::None;
  std::string method = {};                     // "uniform" | "block", full only
  std::optional<std::int64_t> num_layers = {}; // recompute_num_layers, full only
  // Unset: Megatron's default list ["core_attn"] under selective. Entries: NAME or NAME:discard.
  std::optional<std::vector<std::string>> modules = {};
  std::vector<UserSpan> user_spans = {};
};

// Documents of one packed sequence: `count` of `length` tokens each.
struct Documents {
  std::int64_t length = 0, count = 1;
};

// Low-rank adapters beside frozen linears (Megatron-Bridge's names: linear_qkv, linear_proj, linear_fc1,
// linear_fc2, in_proj, out_proj).
struct Lora {
  std::int64_t rank = 0; // 0: none
  std::vector<std::string> targets = {};
  bool on(std::string_view linear) const {
    return rank > 0 && std::find(targets.begin(), targets.end(), linear) != targets.end();
  }
};

// Communication beside compute. Names and defaults are Megatron-LM's.
struct Overlap {
  bool tensor = false;        // tp_comm_overlap: gathers and scatters of linears in pieces beside their GEMM
  bool gradients = false;     // overlap_grad_reduce: buckets are reduced behind the last micro-batch's backward
  bool parameters = false;    // overlap_param_gather: buckets are gathered ahead of the first micro-batch's forward
  bool pipeline = true;       // overlap_p2p_comm: interleaved schedules only
  bool shared_experts = false; // moe_shared_expert_overlap: the shared expert beside the exchanges of the routed ones
  bool delayed_wgrad = false; // delay_wgrad_compute: of experts, beside overlap_moe_expert_parallel_comm's exchanges
};

struct Optimizer {
  bool distributed = true;
  DType gradient_dtype = DType::FP32;      // main gradients
  bool precision_aware = false;
  DType master_dtype = DType::FP32;        // with stored remainders: BF16 (2 bytes)
  DType moment1_dtype = DType::FP32, moment2_dtype = DType::FP32;
  double offload_fraction = 0;             // of the optimizer's state (and update) on the host
};

struct Run {
  std::string source = {};                // "published: ..." or "ours: ..."; printed with every result
  Parallel parallel = {};
  std::int64_t micro_batch = 1, global_batch = 1, seq = 4096;
  Recompute recompute = {};
  Optimizer optimizer = {};
  Overlap overlap = {};
  DType dtype = DType::BF16;              // parameters and activations
  std::string fp8_recipe = {};            // "", "delayed", "tensorwise", "mxfp8", "blockwise"
  bool fp4 = false;
  CrossEntropy cross_entropy = CrossEntropy::Unfused;
  // cross_entropy_fusion_impl; says nothing unless cross_entropy_loss_fusion is on.
  CrossEntropy cross_entropy_impl = CrossEntropy::FusedNative;
  std::int64_t loss_chunk = 0;            // tokens per chunk of the chunked linear cross entropy
  VisionMode vision = VisionMode::Absent;
  bool train_mtp = true;
  bool deterministic = false;
  bool fused_attention = true;            // flash / cuDNN core; false: scores are kept
  double hidden_dropout = 0, attention_dropout = 0;
  double moe_imbalance = 1;               // factor on the balanced row count
  bool moe_worst_case = false;            // every token on this rank's experts: as many rows as can arrive
  std::vector<Documents> documents = {};  // a packed sequence; empty: one document of `seq` tokens
  std::optional<std::int64_t> max_documents = {}; // of a packed micro-batch; unset: model::most_sequences says
  Lora lora = {};                         // all other weights are frozen then
  std::int64_t frozen_bits = 16;          // 8 | 4: frozen linear weights are stored quantised
  std::optional<double> moe_capacity_factor = {}; // padded to capacity
  bool moe_grouped_gemm = true, moe_permute_fusion = true;
  bool moe_router_force_load_balancing = false; // slots go round-robin: benchmarks on random weights
  bool overlap_moe_expert_parallel_comm = false;
  std::string moe_token_dispatcher = "alltoall";
  bool cpu_offloading = false;
  std::int64_t cpu_offloading_num_layers = 0;
  bool fine_grained_offload = false;
  std::vector<std::string> offload_modules = {};
  std::string cuda_graph_impl = "none";   // none | local | transformer_engine | full_iteration
  std::vector<std::string> cuda_graph_scope = {};
  bool distribute_saved_activations = false;
  std::optional<std::int64_t> vocab_divisor = {}; // make_vocab_size_divisible_by (x TP); unset: 128; 0: no padding
  // Which stack is planned.
  std::string stack = "megatron";         // megatron | native
  Build build = Build::Te;
  Revision revision = {"main", {"gdn_qkv"}};
  L2Norm l2norm = L2Norm::Caller;
  std::string attention_variant = {};     // experimental_attention_variant; empty: from the model
  std::string cp_comm_type = "p2p";
  StackSettings settings = {};            // read by the stack's own checks only

  std::int64_t micro_batches() const {    // per step and pipeline
    return global_batch / (micro_batch * parallel.dp());
  }
};

} // namespace gdn::config
