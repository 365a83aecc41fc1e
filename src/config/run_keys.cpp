#include <algorithm>
#include <cmath>
#include <filesystem>
#include <sstream>

#include <fmt/core.h>

#include "config/run_io.h"
#include "config/text.h"
#include "core/error.h"

// The table of run keys. One row: name, what is allowed, help, whether Megatron-LM has it, whether it
// is a stack setting, how to set it, how to read it back.
namespace gdn::config {

namespace {

constexpr std::int64_t kMaxDegree = 1 << 20;  // GPUs, parallel sizes
constexpr std::int64_t kMaxBatch = 1 << 24;   // sequences
constexpr std::int64_t kMaxSequence = 1 << 27; // tokens
constexpr double kInf = HUGE_VAL;

using Choices = std::vector<std::string>;
const Choices kDTypes{"bf16", "fp16", "fp32"};
const Choices kLoraTargets{"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "in_proj", "out_proj"};
const Choices kGraphScopes{"attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba", "full_iteration"};

std::int64_t degree(const Node& v) { return as_int(v, 1, kMaxDegree); }
DType dtype(const Node& v, const Choices& allowed = kDTypes) { return parse_dtype(as_choice(v, allowed)); }
Node name_node(std::string_view name) { return string_node(std::string(name)); }
Node none_or(const std::string& text) { return text.empty() ? Node{} : string_node(text); }

template <typename T> Node none_or(const std::optional<T>& value) {
  return value ? number_node(*value) : Node{};
}
std::optional<std::int64_t> int_or_none(const Node& v, std::int64_t lowest) {
  if (is_none(v)) return std::nullopt;
  return as_int(v, lowest, kMaxDegree);
}
std::string choice_or_none(const Node& v, const Choices& allowed) {
  return is_none(v) ? "" : as_choice(v, allowed);
}

// Names such as module names: what they may be is the stack's question, but not any text is a name.
std::vector<std::string> names(const Node& v) {
  std::vector<std::string> out = as_strings(v);
  for (const std::string& name : out)
    for (char c : name)
      if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
            c == ':' || c == '.' || c == '-'))
        v.fail(fmt::format("'{}' is not a name", name.substr(0, 60)));
  return out;
}

Revision revision(const Node& v) {
  try {
    return Revision::parse(as_string(v));
  } catch (const Error& e) {
    v.fail(e.what(), e.hint());
  }
}

UserSpan user_span(const std::string& text, const Node& v) {
  std::size_t equals = text.find('='), dots = text.find("..");
  UserSpan s;
  if (equals != std::string::npos && dots != std::string::npos && equals < dots) {
    s.name = text.substr(0, equals);
    s.first = text.substr(equals + 1, dots - equals - 1);
    s.last = text.substr(dots + 2);
    if (s.last.ends_with(":discard")) {
      s.discard = true;
      s.last.resize(s.last.size() - 8);
    }
  }
  if (s.name.empty() || s.first.empty() || s.last.empty())
    v.fail(fmt::format("'{}' is not a span", text.substr(0, 60)),
           "write NAME=FIRST_OP..LAST_OP or NAME=FIRST_OP..LAST_OP:discard");
  return s;
}

Node spans_node(const std::vector<UserSpan>& spans) {
  std::vector<std::string> texts;
  for (const UserSpan& s : spans)
    texts.push_back(fmt::format("{}={}..{}{}", s.name, s.first, s.last, s.discard ? ":discard" : ""));
  return list_node(texts);
}

std::vector<std::string> module_names(const Node& v) {
  std::vector<std::string> out = names(v);
  for (std::size_t i = 0; i < out.size(); ++i)
    if (std::find(out.begin(), out.begin() + static_cast<std::ptrdiff_t>(i), out[i]) != out.begin() + static_cast<std::ptrdiff_t>(i))
      v.fail(fmt::format("'{}' is listed twice", out[i].substr(0, 60)));
  return out;
}

void set_granularity(Run& r, const Node& v) {
  std::string g = choice_or_none(v, {"none", "selective", "full"});
  r.recompute.granularity = g == "full" ? Granularity::Full : g == "selective" ? Granularity::Selective : Granularity::None;
}

void set_cross_entropy_fusion(Run& r, const Node& v) {
  r.cross_entropy = as_bool(v) ? r.cross_entropy_impl : CrossEntropy::Unfused;
}

void set_cross_entropy_impl(Run& r, const Node& v) {
  std::string impl = as_choice(v, {"native", "te", "linear"});
  r.cross_entropy_impl = impl == "te" ? CrossEntropy::FusedTe
                         : impl == "linear" ? CrossEntropy::ChunkedLinear : CrossEntropy::FusedNative;
  if (r.cross_entropy != CrossEntropy::Unfused) r.cross_entropy = r.cross_entropy_impl;
}

Node cross_entropy_impl(const Run& r) {
  CrossEntropy impl = r.cross_entropy == CrossEntropy::Unfused ? r.cross_entropy_impl : r.cross_entropy;
  return name_node(impl == CrossEntropy::ChunkedLinear ? "linear" : name_of(impl));
}

// "LENGTH" or "LENGTHxCOUNT", one a document or a bin of a histogram.
void set_documents(Run& r, const Node& v) {
  r.documents.clear();
  if (is_none(v)) return;
  for (const std::string& text : as_strings(v)) {
    const std::size_t x = text.find('x');
    Documents d;
    d.length = as_int(Node::scalar(text.substr(0, x), v.where, v.path), 1, kMaxSequence);
    if (x != std::string::npos) d.count = as_int(Node::scalar(text.substr(x + 1), v.where, v.path), 1, kMaxSequence);
    r.documents.push_back(d);
  }
  r.settings.packed = !r.documents.empty();
}

Node documents_node(const Run& r) {
  if (r.documents.empty()) return Node{};
  std::vector<std::string> texts;
  for (const Documents& d : r.documents) texts.push_back(d.count == 1 ? fmt::format("{}", d.length) : fmt::format("{}x{}", d.length, d.count));
  return list_node(texts);
}

// A relative path starts at the file that names it; one of an option, at the working folder.
std::string beside(const Node& v, const std::string& file) {
  const std::size_t end = v.where.find(".yaml:");
  if (end == std::string::npos || std::filesystem::path(file).is_absolute()) return file;
  return (std::filesystem::path(v.where.substr(0, end)).parent_path() / file).string();
}

// The factor below which the share `quantile` of the counts lies: lines of "factor count".
double histogram_quantile(const Node& v, double quantile, const std::string& name) {
  const std::string file = beside(v, name);
  std::istringstream in(read_text_file(file));
  std::vector<std::pair<double, double>> bins;
  double factor = 0, count = 0, total = 0;
  for (std::string line; std::getline(in, line);) {
    if (line.empty() || line[0] == '#') continue;
    std::istringstream fields(line);
    if (!(fields >> factor >> count) || factor < 1 || count < 0)
      v.fail(fmt::format("{}: '{}' is not a factor >= 1 and a count", file, line.substr(0, 60)));
    bins.push_back({factor, count});
    total += count;
  }
  if (total <= 0) v.fail(fmt::format("{} counts nothing", file));
  std::sort(bins.begin(), bins.end());
  double below = 0;
  for (const auto& [f, n] : bins)
    if ((below += n) >= quantile * total) return f;
  return bins.back().first;
}

void set_imbalance(Run& r, const Node& v) {
  const std::string text = as_string(v);
  r.moe_worst_case = text == "worst";
  if (r.moe_worst_case) {
    r.moe_imbalance = 1;
    return;
  }
  const std::size_t colon = text.find(':');
  if (text.size() > 1 && text[0] == 'p' && colon != std::string::npos) {
    const double q = as_double(Node::scalar(text.substr(1, colon - 1), v.where, v.path), 0, 100);
    r.moe_imbalance = histogram_quantile(v, q / 100, text.substr(colon + 1));
    return;
  }
  r.moe_imbalance = as_double(v, 1, 1e6);
}

std::vector<RunKey> make_keys() {
  // clang-format off
  std::vector<RunKey> keys{
      {"source", "text", "where this run comes from: 'published: ...' or 'ours: ...'", false, false,
       [](Run& r, const Node& v) { r.source = is_none(v) ? "" : as_string(v); }, [](const Run& r) { return none_or(r.source); }},

      // Parallelism.
      {"gpus", "integer >= 1", "world size", false, false,
       [](Run& r, const Node& v) { r.parallel.gpus = degree(v); }, [](const Run& r) { return number_node(r.parallel.gpus); }},
      {"tensor_model_parallel_size", "integer >= 1", "TP", true, false,
       [](Run& r, const Node& v) { r.parallel.tp = degree(v); }, [](const Run& r) { return number_node(r.parallel.tp); }},
      {"context_parallel_size", "integer >= 1", "CP", true, false,
       [](Run& r, const Node& v) { r.parallel.cp = degree(v); }, [](const Run& r) { return number_node(r.parallel.cp); }},
      {"pipeline_model_parallel_size", "integer >= 1", "PP", true, false,
       [](Run& r, const Node& v) { r.parallel.pp = degree(v); }, [](const Run& r) { return number_node(r.parallel.pp); }},
      {"virtual_pipeline_model_parallel_size", "integer >= 1, or null", "VP: model chunks per rank", true, false,
       [](Run& r, const Node& v) { r.parallel.vp = int_or_none(v, 1).value_or(1); }, [](const Run& r) { return number_node(r.parallel.vp); }},
      {"pipeline_model_parallel_layout", "list of layers per virtual stage, or a layout string such as \"Et*15|t*15|t*15|t*15mL\"",
       "uneven pipeline in model order; null: even split", true, false,
       [](Run& r, const Node& v) { r.parallel.layout = is_none(v) ? std::vector<std::int64_t>{} : parse_layout(v); },
       [](const Run& r) { return r.parallel.layout.empty() ? Node{} : list_node(r.parallel.layout); }},
      {"decoder_first_pipeline_num_layers", "integer >= 0, or null", "layers of the first stage; the rest divide evenly", true, false,
       [](Run& r, const Node& v) { r.parallel.first_stage_layers = int_or_none(v, 0); }, [](const Run& r) { return none_or(r.parallel.first_stage_layers); }},
      {"decoder_last_pipeline_num_layers", "integer >= 0, or null", "layers of the last stage", true, false,
       [](Run& r, const Node& v) { r.parallel.last_stage_layers = int_or_none(v, 0); }, [](const Run& r) { return none_or(r.parallel.last_stage_layers); }},
      {"expert_model_parallel_size", "integer >= 1", "EP", true, false,
       [](Run& r, const Node& v) { r.parallel.ep = degree(v); }, [](const Run& r) { return number_node(r.parallel.ep); }},
      {"expert_tensor_parallel_size", "integer >= 1", "ETP", true, false,
       [](Run& r, const Node& v) { r.parallel.etp = degree(v); }, [](const Run& r) { return number_node(r.parallel.etp); }},
      {"sequence_parallel", "true | false", "SP", true, false,
       [](Run& r, const Node& v) { r.parallel.sequence_parallel = as_bool(v); }, [](const Run& r) { return bool_node(r.parallel.sequence_parallel); }},
      {"cp_comm_type", "p2p | all_gather | a2a | a2a+p2p", "how attention exchanges under CP; GDN ignores it", true, false,
       [](Run& r, const Node& v) { r.cp_comm_type = as_choice(v, {"p2p", "all_gather", "a2a", "a2a+p2p"}); }, [](const Run& r) { return string_node(r.cp_comm_type); }},

      // Batch.
      {"micro_batch_size", "integer >= 1", "sequences per micro-batch and data-parallel rank", true, false,
       [](Run& r, const Node& v) { r.micro_batch = as_int(v, 1, kMaxBatch); }, [](const Run& r) { return number_node(r.micro_batch); }},
      {"global_batch_size", "integer >= 1", "sequences per step", true, false,
       [](Run& r, const Node& v) { r.global_batch = as_int(v, 1, kMaxBatch); }, [](const Run& r) { return number_node(r.global_batch); }},
      {"seq_length", "integer >= 1", "tokens per sequence", true, false,
       [](Run& r, const Node& v) { r.seq = as_int(v, 1, kMaxSequence); }, [](const Run& r) { return number_node(r.seq); }},

      {"document_lengths", "list of LENGTH or LENGTHxCOUNT, or null", "documents of one packed sequence; their lengths add up to seq_length", false, false,
       set_documents, documents_node},
      {"max_documents", "integer >= 1, or null", "documents that a packed micro-batch may have, which our kernels' scratch has room for; null: one for every 64 tokens, 64 at least", false, false,
       [](Run& r, const Node& v) { r.max_documents = int_or_none(v, 1); }, [](const Run& r) { return none_or(r.max_documents); }},

      // Recompute.
      {"recompute_granularity", "null | selective | full", "", true, false,
       set_granularity, [](const Run& r) { return r.recompute.granularity == Granularity::None ? Node{} : name_node(name_of(r.recompute.granularity)); }},
      {"recompute_method", "null | uniform | block", "full granularity only", true, false,
       [](Run& r, const Node& v) { r.recompute.method = choice_or_none(v, {"uniform", "block"}); }, [](const Run& r) { return none_or(r.recompute.method); }},
      {"recompute_num_layers", "integer >= 0, or null", "layers per group (uniform) or recomputed layers per stage (block)", true, false,
       [](Run& r, const Node& v) { r.recompute.num_layers = int_or_none(v, 0); }, [](const Run& r) { return none_or(r.recompute.num_layers); }},
      {"recompute_modules", "list of module names, or null", "selective only; null: the stack's default, [core_attn]", true, false,
       [](Run& r, const Node& v) { if (is_none(v)) r.recompute.modules.reset(); else r.recompute.modules = module_names(v); },
       [](const Run& r) { return r.recompute.modules ? list_node(*r.recompute.modules) : Node{}; }},
      {"spans", "list of NAME=FIRST_OP..LAST_OP[:discard]", "user spans, priced as hypothetical modules", false, false,
       [](Run& r, const Node& v) { r.recompute.user_spans.clear(); for (const std::string& s : as_strings(v)) r.recompute.user_spans.push_back(user_span(s, v)); },
       [](const Run& r) { return spans_node(r.recompute.user_spans); }},
      {"distribute_saved_activations", "true | false", "", true, false,
       [](Run& r, const Node& v) { r.distribute_saved_activations = as_bool(v); }, [](const Run& r) { return bool_node(r.distribute_saved_activations); }},

      // Numbers and optimizer.
      {"params_dtype", "bf16 | fp16 | fp32", "parameters and activations", true, false,
       [](Run& r, const Node& v) { r.dtype = dtype(v); }, [](const Run& r) { return name_node(name_of(r.dtype)); }},
      {"fp8_recipe", "null | delayed | tensorwise | mxfp8 | blockwise", "", true, false,
       [](Run& r, const Node& v) { r.fp8_recipe = choice_or_none(v, {"delayed", "tensorwise", "mxfp8", "blockwise"}); }, [](const Run& r) { return none_or(r.fp8_recipe); }},
      {"fp4", "true | false", "", true, false,
       [](Run& r, const Node& v) { r.fp4 = as_bool(v); }, [](const Run& r) { return bool_node(r.fp4); }},
      {"use_distributed_optimizer", "true | false", "optimizer state sharded over data-parallel ranks", true, false,
       [](Run& r, const Node& v) { r.optimizer.distributed = as_bool(v); }, [](const Run& r) { return bool_node(r.optimizer.distributed); }},
      {"use_precision_aware_optimizer", "true | false", "Transformer Engine's Adam; lets the dtypes below differ from fp32", true, false,
       [](Run& r, const Node& v) { r.optimizer.precision_aware = as_bool(v); }, [](const Run& r) { return bool_node(r.optimizer.precision_aware); }},
      {"main_grads_dtype", "fp32 | bf16", "gradient buffers and their reduction", true, false,
       [](Run& r, const Node& v) { r.optimizer.gradient_dtype = dtype(v, {"fp32", "bf16"}); }, [](const Run& r) { return name_node(name_of(r.optimizer.gradient_dtype)); }},
      {"main_params_dtype", "fp32 | fp16 | bf16", "master weights; bf16: the 2-byte remainder of an fp32 master", true, false,
       [](Run& r, const Node& v) { r.optimizer.master_dtype = dtype(v); }, [](const Run& r) { return name_node(name_of(r.optimizer.master_dtype)); }},
      {"exp_avg_dtype", "fp32 | fp16 | bf16 | fp8", "first moment", true, false,
       [](Run& r, const Node& v) { r.optimizer.moment1_dtype = dtype(v, {"fp32", "fp16", "bf16", "fp8"}); }, [](const Run& r) { return name_node(name_of(r.optimizer.moment1_dtype)); }},
      {"exp_avg_sq_dtype", "fp32 | fp16 | bf16 | fp8", "second moment", true, false,
       [](Run& r, const Node& v) { r.optimizer.moment2_dtype = dtype(v, {"fp32", "fp16", "bf16", "fp8"}); }, [](const Run& r) { return name_node(name_of(r.optimizer.moment2_dtype)); }},
      {"optimizer_offload_fraction", "number from 0 to 1", "optimizer_cpu_offload: this share of state and update on the host", true, false,
       [](Run& r, const Node& v) { r.optimizer.offload_fraction = as_double(v, 0, 1); }, [](const Run& r) { return number_node(r.optimizer.offload_fraction); }},
      {"lora_rank", "integer >= 0", "low-rank adapters on lora_targets; all other weights are frozen; 0: full training", false, false,
       [](Run& r, const Node& v) { r.lora.rank = as_int(v, 0, kMaxDegree); if (r.lora.rank > 0 && r.lora.targets.empty()) r.lora.targets = kLoraTargets; },
       [](const Run& r) { return number_node(r.lora.rank); }},
      {"lora_targets", "list of linear_qkv, linear_proj, linear_fc1, linear_fc2, in_proj, out_proj", "linears with adapters (Megatron-Bridge's names)", false, false,
       [](Run& r, const Node& v) {
         r.lora.targets.clear();
         if (is_none(v)) return;
         for (const std::string& s : as_strings(v)) r.lora.targets.push_back(as_choice(Node::scalar(s, v.where, v.path), kLoraTargets));
       }, [](const Run& r) { return list_node(r.lora.targets); }},
      {"frozen_weight_bits", "16 | 8 | 4", "storage of frozen linear weights; embeddings, head, norms, router and GDN gates stay in params_dtype", false, false,
       [](Run& r, const Node& v) { r.frozen_bits = std::stoll(as_choice(v, {"16", "8", "4"})); }, [](const Run& r) { return number_node(r.frozen_bits); }},
      {"deterministic_mode", "true | false", "", true, false,
       [](Run& r, const Node& v) { r.deterministic = as_bool(v); }, [](const Run& r) { return bool_node(r.deterministic); }},

      // Loss, embedding, heads beside the decoder.
      {"cross_entropy_loss_fusion", "true | false", "", true, false,
       set_cross_entropy_fusion, [](const Run& r) { return bool_node(r.cross_entropy != CrossEntropy::Unfused); }},
      {"cross_entropy_fusion_impl", "native | te | linear", "with cross_entropy_loss_fusion; linear: fused with the head GEMM, in chunks", true, false,
       set_cross_entropy_impl, cross_entropy_impl},
      {"loss_chunk_size", "integer >= 0", "tokens per chunk of the linear cross entropy; 0: chosen for you", false, false,
       [](Run& r, const Node& v) { r.loss_chunk = as_int(v, 0, kMaxSequence); }, [](const Run& r) { return number_node(r.loss_chunk); }},
      {"make_vocab_size_divisible_by", "integer >= 0, or null", "x TP; null: 128, 0: no padding", true, false,
       [](Run& r, const Node& v) { r.vocab_divisor = int_or_none(v, 0); }, [](const Run& r) { return none_or(r.vocab_divisor); }},
      {"vision", "trained | frozen | absent", "the vision tower in this run", false, false,
       [](Run& r, const Node& v) {
         std::string mode = as_choice(v, {"trained", "frozen", "absent"});
         r.vision = mode == "trained" ? VisionMode::Trained : mode == "frozen" ? VisionMode::Frozen : VisionMode::Absent;
       }, [](const Run& r) { return name_node(name_of(r.vision)); }},
      {"train_mtp", "true | false", "the model's multi-token prediction layers are trained", false, false,
       [](Run& r, const Node& v) { r.train_mtp = as_bool(v); }, [](const Run& r) { return bool_node(r.train_mtp); }},

      // Attention.
      {"attention_backend", "auto | flash | fused | unfused | local", "unfused and local keep the s x s scores", true, false,
       [](Run& r, const Node& v) {
         std::string backend = as_choice(v, {"auto", "flash", "fused", "unfused", "local"});
         r.fused_attention = backend != "unfused" && backend != "local";
       }, [](const Run& r) { return name_node(r.fused_attention ? "auto" : "unfused"); }},
      {"hidden_dropout", "number from 0 to 1", "", true, false,
       [](Run& r, const Node& v) { r.hidden_dropout = as_double(v, 0, 1); }, [](const Run& r) { return number_node(r.hidden_dropout); }},
      {"attention_dropout", "number from 0 to 1", "", true, false,
       [](Run& r, const Node& v) { r.attention_dropout = as_double(v, 0, 1); }, [](const Run& r) { return number_node(r.attention_dropout); }},
      {"experimental_attention_variant", "null | gdn | gated_delta_net | gdn2 | dsa", "null: from the model", true, false,
       [](Run& r, const Node& v) { r.attention_variant = choice_or_none(v, {"gdn", "gated_delta_net", "gdn2", "dsa"}); }, [](const Run& r) { return none_or(r.attention_variant); }},

      // Experts.
      {"moe_grouped_gemm", "true | false", "", true, false,
       [](Run& r, const Node& v) { r.moe_grouped_gemm = as_bool(v); }, [](const Run& r) { return bool_node(r.moe_grouped_gemm); }},
      {"moe_permute_fusion", "true | false", "", true, false,
       [](Run& r, const Node& v) { r.moe_permute_fusion = as_bool(v); }, [](const Run& r) { return bool_node(r.moe_permute_fusion); }},
      {"moe_token_dispatcher_type", "allgather | alltoall | flex", "", true, false,
       [](Run& r, const Node& v) { r.moe_token_dispatcher = as_choice(v, {"allgather", "alltoall", "flex"}); }, [](const Run& r) { return string_node(r.moe_token_dispatcher); }},
      {"moe_router_force_load_balancing", "true | false", "slots go round-robin over the experts", true, false,
       [](Run& r, const Node& v) { r.moe_router_force_load_balancing = as_bool(v); }, [](const Run& r) { return bool_node(r.moe_router_force_load_balancing); }},
      {"moe_shared_expert_overlap", "true | false", "", true, false,
       [](Run& r, const Node& v) { r.overlap.shared_experts = as_bool(v); }, [](const Run& r) { return bool_node(r.overlap.shared_experts); }},
      {"overlap_moe_expert_parallel_comm", "true | false", "", true, false,
       [](Run& r, const Node& v) { r.overlap_moe_expert_parallel_comm = as_bool(v); }, [](const Run& r) { return bool_node(r.overlap_moe_expert_parallel_comm); }},
      {"delay_wgrad_compute", "true | false", "weight gradients of experts beside the exchanges of overlap_moe_expert_parallel_comm", true, false,
       [](Run& r, const Node& v) { r.overlap.delayed_wgrad = as_bool(v); }, [](const Run& r) { return bool_node(r.overlap.delayed_wgrad); }},
      {"tp_comm_overlap", "true | false", "gathers and scatters of linears in pieces beside their GEMMs", true, false,
       [](Run& r, const Node& v) { r.overlap.tensor = as_bool(v); }, [](const Run& r) { return bool_node(r.overlap.tensor); }},
      {"overlap_grad_reduce", "true | false", "gradients are reduced behind the last micro-batch's backward", true, false,
       [](Run& r, const Node& v) { r.overlap.gradients = as_bool(v); }, [](const Run& r) { return bool_node(r.overlap.gradients); }},
      {"overlap_param_gather", "true | false", "parameters are gathered ahead of the first micro-batch's forward", true, false,
       [](Run& r, const Node& v) { r.overlap.parameters = as_bool(v); }, [](const Run& r) { return bool_node(r.overlap.parameters); }},
      {"overlap_p2p_comm", "true | false", "pipeline transfers beside compute; interleaved schedules only", true, false,
       [](Run& r, const Node& v) { r.overlap.pipeline = as_bool(v); }, [](const Run& r) { return bool_node(r.overlap.pipeline); }},
      {"moe_expert_capacity_factor", "number > 0, or null", "experts padded to this factor of the balanced row count", true, false,
       [](Run& r, const Node& v) { if (is_none(v)) r.moe_capacity_factor.reset(); else r.moe_capacity_factor = as_double(v, 1e-3, 1e6); },
       [](const Run& r) { return none_or(r.moe_capacity_factor); }},
      {"moe_imbalance", "number >= 1, worst, or pQ:FILE such as p99:loads.txt",
       "rows of the busiest rank over the balanced count; worst: all that can arrive; a quantile of a file with a factor and a count a line", false, false,
       set_imbalance, [](const Run& r) { return r.moe_worst_case ? string_node("worst") : number_node(r.moe_imbalance); }},

      // Offload and CUDA graphs.
      {"cpu_offloading", "true | false", "", true, false,
       [](Run& r, const Node& v) { r.cpu_offloading = as_bool(v); }, [](const Run& r) { return bool_node(r.cpu_offloading); }},
      {"cpu_offloading_num_layers", "integer >= 0", "", true, false,
       [](Run& r, const Node& v) { r.cpu_offloading_num_layers = as_int(v, 0, kMaxDegree); }, [](const Run& r) { return number_node(r.cpu_offloading_num_layers); }},
      {"fine_grained_activation_offloading", "true | false", "", true, false,
       [](Run& r, const Node& v) { r.fine_grained_offload = as_bool(v); }, [](const Run& r) { return bool_node(r.fine_grained_offload); }},
      {"offload_modules", "list of names", "", true, false,
       [](Run& r, const Node& v) { r.offload_modules = is_none(v) ? std::vector<std::string>{} : names(v); }, [](const Run& r) { return list_node(r.offload_modules); }},
      {"cuda_graph_impl", "none | local | transformer_engine | full_iteration", "", true, false,
       [](Run& r, const Node& v) { r.cuda_graph_impl = is_none(v) ? "none" : as_choice(v, {"none", "local", "transformer_engine", "full_iteration"}); },
       [](const Run& r) { return Node::scalar(r.cuda_graph_impl); }},
      {"cuda_graph_scope", "list of attn, mlp, moe, moe_router, moe_preprocess, mamba, full_iteration", "", true, false,
       [](Run& r, const Node& v) {
         r.cuda_graph_scope.clear();
         if (is_none(v)) return;
         for (const std::string& s : as_strings(v)) r.cuda_graph_scope.push_back(as_choice(Node::scalar(s, v.where, v.path), kGraphScopes));
       }, [](const Run& r) { return list_node(r.cuda_graph_scope); }},

      // Which stack is planned.
      {"stack", "megatron | native", "", false, false,
       [](Run& r, const Node& v) { r.stack = as_choice(v, {"megatron", "native"}); }, [](const Run& r) { return string_node(r.stack); }},
      {"build", "te | local", "Transformer Engine's fused norms, or separate ones", false, false,
       [](Run& r, const Node& v) { r.build = as_choice(v, {"te", "local"}) == "te" ? Build::Te : Build::Local; }, [](const Run& r) { return name_node(name_of(r.build)); }},
      {"revision", "base[+change...], e.g. main+gdn_qkv", "tree of the target stack", false, false,
       [](Run& r, const Node& v) { r.revision = revision(v); }, [](const Run& r) { return string_node(r.revision.text()); }},
      {"l2norm", "caller | kernel | off", "who normalises q and k of the delta rule", false, false,
       [](Run& r, const Node& v) {
         std::string who = as_choice(v, {"caller", "kernel", "off"});
         r.l2norm = who == "caller" ? L2Norm::Caller : who == "kernel" ? L2Norm::Kernel : L2Norm::Off;
       }, [](const Run& r) { return name_node(name_of(r.l2norm)); }},
  };
  // clang-format on
  append_setting_keys(keys);
  return keys;
}

} // namespace

const std::vector<RunKey>& run_keys() {
  static const std::vector<RunKey> keys = make_keys();
  return keys;
}

} // namespace gdn::config
