#include <algorithm>
#include <map>
#include <optional>

#include <fmt/core.h>

#include "config/import.h"
#include "config/model_io.h"
#include "config/run_io.h"
#include "config/shell_words.h"
#include "core/error.h"

namespace gdn::config {

namespace {

struct Option {
  std::string name; // with underscores, without the dashes
  std::string where;
  std::vector<ShellWord> values = {};
};

// Words before the first option (a launcher, a script) are skipped; so is the syntax of bash arrays.
std::vector<Option> split_options(const std::vector<ShellWord>& words) {
  std::vector<Option> options;
  bool takes_values = false;
  for (const ShellWord& w : words) {
    if (w.text.size() > 2 && w.text.starts_with("--")) {
      std::string name = w.text.substr(2);
      std::size_t equals = name.find('=');
      Option o{name.substr(0, equals), w.where};
      std::replace(o.name.begin(), o.name.end(), '-', '_');
      if (equals != std::string::npos) o.values.push_back({name.substr(equals + 1), w.where, w.expands});
      takes_values = equals == std::string::npos;
      options.push_back(std::move(o));
    } else if (w.text == ")" || w.text.ends_with("=(") || w.text.ends_with("+=(")) {
      takes_values = false;
    } else if (takes_values) {
      options.back().values.push_back(w);
    }
  }
  return options;
}

// Lists as Megatron-LM writes layer patterns: "[1, 1, 0]", "([1]*3+[0])*12", "[1]*3+[0]*1".
class PatternParser {
public:
  PatternParser(std::string_view text, const Node& node) : node_(node) {
    for (char c : text)
      if (c != ' ') text_ += c;
  }
  std::vector<std::int64_t> parse() {
    std::vector<std::int64_t> out = sum(0);
    if (at_ != text_.size()) fail();
    return out;
  }

private:
  [[noreturn]] void fail() const {
    node_.fail(fmt::format("'{}' is not an integer or a list such as '([1]*3+[0])*12'", node_.text.substr(0, 60)));
  }
  bool eat(char c) {
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  std::int64_t number() {
    std::size_t begin = at_;
    while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') ++at_;
    if (at_ == begin || at_ - begin > 6) fail();
    return std::stoll(text_.substr(begin, at_ - begin));
  }
  std::vector<std::int64_t> sum(int depth) {
    if (depth > 8) fail();
    std::vector<std::int64_t> out = product(depth);
    while (eat('+')) {
      std::vector<std::int64_t> more = product(depth);
      out.insert(out.end(), more.begin(), more.end());
    }
    return out;
  }
  std::vector<std::int64_t> product(int depth) {
    std::vector<std::int64_t> unit, out;
    if (eat('(')) {
      unit = sum(depth + 1);
      if (!eat(')')) fail();
    } else if (eat('[')) {
      do unit.push_back(number());
      while (eat(','));
      if (!eat(']')) fail();
    } else {
      fail();
    }
    while (eat('*')) {
      std::int64_t times = number();
      if (times * static_cast<std::int64_t>(unit.size()) > 4096) fail();
      out.clear();
      for (std::int64_t i = 0; i < times; ++i) out.insert(out.end(), unit.begin(), unit.end());
      unit = out;
    }
    return unit;
  }

  const Node& node_;
  std::string text_ = {};
  std::size_t at_ = 0;
};

// Options that are neither a run key nor a model key of the same name.
enum class Form { Flag, Value };
const std::map<std::string, Form> kSpecial{
    {"bf16", Form::Flag}, {"fp16", Form::Flag}, {"grad_reduce_in_bf16", Form::Flag},
    {"accumulate_allreduce_grads_in_fp32", Form::Flag}, {"fp8_format", Form::Value}, {"fp4_format", Form::Value},
    {"transformer_impl", Form::Value}, {"recompute_activations", Form::Flag}, {"nproc_per_node", Form::Value},
    {"nnodes", Form::Value}, {"num_layers_per_virtual_pipeline_stage", Form::Value},
    {"num_virtual_stages_per_pipeline_rank", Form::Value}, {"moe_pad_expert_input_to_capacity", Form::Flag},
    {"group_query_attention", Form::Flag}, {"swiglu", Form::Flag}, {"normalization", Form::Value},
    {"disable_bias_linear", Form::Flag}, {"untie_embeddings_and_output_weights", Form::Flag},
    {"use_rotary_position_embeddings", Form::Flag}, {"position_embedding_type", Form::Value},
    {"moe_layer_freq", Form::Value}, {"linear_attention_freq", Form::Value}, {"moe_router_pre_softmax", Form::Flag}};

// Model options that take no value.
const std::vector<std::string> kModelFlags{"apply_layernorm_1p", "attention_output_gate", "qk_layernorm",
                                           "add_qkv_bias", "moe_shared_expert_gate"};

bool is_flag_key(const RunKey& key) { return key.allowed == "true | false"; }
bool is_list_key(const RunKey& key) { return key.allowed.starts_with("list of"); }

class Reader {
public:
  Reader(std::string_view text, const std::string& file) : file_(file) {
    for (Option& o : split_options(shell_words(text, file))) take(std::move(o));
  }

  MegatronArguments read() {
    run_part();
    model_part();
    return std::move(out_);
  }

private:
  void take(Option o) {
    auto special = kSpecial.find(o.name);
    const RunKey* key = find_run_key(o.name);
    if (key && !key->megatron) key = nullptr;
    bool model = o.name != "name" && o.name != "source" && o.name != "aliases" && is_model_option(o.name);
    bool flag = false, list = false;
    if (special != kSpecial.end()) flag = special->second == Form::Flag;
    else if (key) flag = is_flag_key(*key), list = is_list_key(*key) && o.name != "pipeline_model_parallel_layout";
    else if (model) flag = std::count(kModelFlags.begin(), kModelFlags.end(), o.name) > 0;
    else return unread(o);

    std::size_t used = flag ? 0 : list ? o.values.size() : 1;
    if (o.values.size() < used || (list && o.values.empty())) fail(o, "needs a value");
    for (std::size_t i = 0; i < used; ++i)
      if (o.values[i].expands)
        fail(o, fmt::format("'{}' is a shell variable; write its value", o.values[i].text.substr(0, 60)));
    if (o.values.size() > used) {
      // A flag or a value followed by more words: "--bf16 true" is an error there too.
      Option rest{o.name, o.where, {o.values.begin() + static_cast<std::ptrdiff_t>(used), o.values.end()}};
      out_.unread.push_back(words(rest, false));
      o.values.resize(used);
    }
    seen_[o.name] = std::move(o); // the last one wins, as in argparse
  }

  static bool is_model_option(const std::string& name) {
    for (const ModelKey& k : model_keys())
      if (k.megatron == name || (k.megatron.empty() && k.name == name && name != "vision_config" && name != "parameters" &&
                                 name != "parameters_only" && name != "unmodelled_sizes" && name != "layer_types"))
        return true;
    return false;
  }

  static std::string words(const Option& o, bool with_name) {
    std::string out;
    if (with_name) {
      std::string name = o.name;
      std::replace(name.begin(), name.end(), '_', '-');
      out = "--" + name;
    }
    for (const ShellWord& w : o.values) out += (out.empty() ? "" : " ") + w.text;
    return out;
  }
  void unread(const Option& o) { out_.unread.push_back(words(o, true)); }

  [[noreturn]] void fail(const Option& o, const std::string& message) const {
    throw Error(ErrorCode::Config, fmt::format("{}: {}: {}", o.where, words({o.name, {}, {}}, true), message));
  }
  const Option* given(const std::string& name) const {
    auto it = seen_.find(name);
    return it == seen_.end() ? nullptr : &it->second;
  }
  bool flag(const std::string& name) const { return given(name) != nullptr; }
  // The value of an option as a node whose errors name the option.
  std::optional<Node> value(const std::string& name) const {
    const Option* o = given(name);
    if (!o) return std::nullopt;
    return Node::scalar(words(*o, false), o->where, words({o->name, {}, {}}, true));
  }
  std::int64_t integer(const std::string& name, std::int64_t otherwise) const {
    std::optional<Node> v = value(name);
    return v ? as_int(*v, 0, std::int64_t{1} << 40) : otherwise;
  }
  void note(std::string text) { out_.notes.push_back(std::move(text)); }

  void set(const std::string& key, const std::string& text, const std::string& where) {
    out_.run.push_back({key, text, where});
  }

  void run_part() {
    // What Megatron-LM does when an argument is absent, where that differs from this program's defaults.
    const std::string absent = file_ + ": Megatron-LM's default";
    for (auto [key, text] : std::initializer_list<std::pair<const char*, const char*>>{
             {"use_distributed_optimizer", "false"}, {"moe_grouped_gemm", "false"}, {"moe_permute_fusion", "false"},
             {"moe_token_dispatcher_type", "allgather"}, {"hidden_dropout", "0.1"}, {"attention_dropout", "0.1"}})
      set(key, text, absent);
    set("params_dtype", flag("bf16") ? "bf16" : flag("fp16") ? "fp16" : "fp32", absent);
    if (flag("grad_reduce_in_bf16") && !flag("accumulate_allreduce_grads_in_fp32"))
      set("main_grads_dtype", "bf16", given("grad_reduce_in_bf16")->where);
    std::int64_t tp = integer("tensor_model_parallel_size", 1);
    if (!given("expert_tensor_parallel_size")) set("expert_tensor_parallel_size", std::to_string(tp), absent);

    for (const RunKey& key : run_keys()) {
      const Option* o = given(std::string(key.name));
      if (!key.megatron || !o || kSpecial.count(o->name)) continue;
      if (key.name == "fp8_recipe" && !given("fp8_format")) {
        note("--fp8-recipe has no effect without --fp8-format");
        continue;
      }
      if (key.name == "moe_expert_capacity_factor" && !flag("moe_pad_expert_input_to_capacity")) {
        note("--moe-expert-capacity-factor without --moe-pad-expert-input-to-capacity only drops tokens; rows are counted as balanced");
        continue;
      }
      set(std::string(key.name), is_flag_key(key) ? "true" : words(*o, false), o->where);
    }

    if (const Option* o = given("fp8_format"); o && !given("fp8_recipe")) set("fp8_recipe", "delayed", o->where);
    if (const Option* o = given("fp4_format")) set("fp4", "true", o->where);
    if (std::optional<Node> v = value("transformer_impl"))
      set("build", as_choice(*v, {"transformer_engine", "local", "inference_optimized"}) == "local" ? "local" : "te", v->where);
    if (const Option* o = given("recompute_activations"); o && !given("recompute_granularity"))
      set("recompute_granularity", "selective", o->where);
    if (flag("use_precision_aware_optimizer") && flag("bf16") && !given("main_params_dtype")) {
      set("main_params_dtype", "bf16", absent);
      note("--use-precision-aware-optimizer keeps fp32 masters as 2-byte remainders of the bf16 parameters (store_param_remainders)");
    }
    if (const Option* o = given("linear_attention_freq"); o && !given("num_layers"))
      set("settings.linear_attention_freq", words(*o, false), o->where);
    virtual_stages(absent);
    if (given("nproc_per_node"))
      set("gpus", std::to_string(integer("nproc_per_node", 1) * integer("nnodes", 1)), given("nproc_per_node")->where);
    else
      note("the number of GPUs is not among the arguments; give it as gpus");
    batch(tp, absent);
  }

  void batch(std::int64_t tp, const std::string& absent) {
    if (!given("micro_batch_size")) note("--micro-batch-size is not given");
    if (!given("seq_length")) note("--seq-length is not given");
    if (given("global_batch_size") || !given("micro_batch_size")) return;
    std::int64_t ranks = integer("nproc_per_node", 0) * integer("nnodes", 1);
    std::int64_t model = tp * integer("pipeline_model_parallel_size", 1) * integer("context_parallel_size", 1);
    if (ranks > 0 && model > 0 && ranks % model == 0)
      set("global_batch_size", std::to_string(integer("micro_batch_size", 1) * (ranks / model)), absent);
    else
      note("--global-batch-size is not given; Megatron-LM would take micro-batch size x data-parallel size");
  }

  void virtual_stages(const std::string& absent) {
    if (const Option* o = given("num_virtual_stages_per_pipeline_rank"))
      return set("virtual_pipeline_model_parallel_size", words(*o, false), o->where);
    const Option* o = given("num_layers_per_virtual_pipeline_stage");
    if (!o) return;
    std::int64_t layers = integer("num_layers", 0), pp = integer("pipeline_model_parallel_size", 1);
    std::int64_t each = integer(o->name, 0);
    if (layers == 0) fail(*o, "needs --num-layers to mean a number of chunks");
    if (each == 0 || pp == 0 || layers % pp != 0 || layers / pp % each != 0)
      fail(*o, fmt::format("{} layers on {} stages do not divide by {}", layers, pp, each));
    set("virtual_pipeline_model_parallel_size", std::to_string(layers / pp / each), o->where.empty() ? absent : o->where);
  }

  void put(const char* key, const std::string& text, const std::string& where) {
    out_.model.set(key, Node::scalar(text, where, key));
  }
  void put_default(const char* key, const std::string& text) {
    if (!out_.model.find(key)) put(key, text, file_ + ": Megatron-LM's default");
  }

  void model_part() {
    if (!given("num_layers")) {
      for (const auto& [name, o] : seen_)
        if (!find_run_key(name) && !is_run_special(name)) unread(o); // no model: these say nothing
      return;
    }
    out_.model.where = file_;
    put("name", "imported", file_);
    put("source", "Megatron-LM arguments", file_);
    for (const ModelKey& k : model_keys()) {
      std::string option(k.megatron.empty() ? k.name : k.megatron);
      const Option* o = given(option);
      if (!o || kSpecial.count(option)) continue;
      bool is_flag = std::count(kModelFlags.begin(), kModelFlags.end(), option) > 0;
      out_.model.set(std::string(k.name), Node::scalar(is_flag ? "true" : words(*o, false), o->where, words({o->name, {}, {}}, true)));
    }
    patterns();
    defaults();
  }

  static bool is_run_special(const std::string& name) {
    static const std::vector<std::string> kModelSpecial{
        "group_query_attention", "swiglu", "normalization", "disable_bias_linear", "untie_embeddings_and_output_weights",
        "use_rotary_position_embeddings", "position_embedding_type", "moe_layer_freq", "linear_attention_freq",
        "moe_router_pre_softmax"};
    return kSpecial.count(name) && std::count(kModelSpecial.begin(), kModelSpecial.end(), name) == 0;
  }

  void patterns() {
    std::int64_t layers = integer("num_layers", 1);
    auto list_of = [&](const Node& v) {
      std::vector<std::int64_t> out = PatternParser(v.text, v).parse();
      if (static_cast<std::int64_t>(out.size()) != layers)
        v.fail(fmt::format("the list has {} entries for {} layers", out.size(), layers));
      return out;
    };
    auto is_integer = [](const Node& v) { return v.text.find_first_not_of("0123456789") == std::string::npos; };
    if (std::optional<Node> v = value("linear_attention_freq")) {
      if (is_integer(*v)) {
        put("full_attention_interval", v->text, v->where);
      } else {
        std::vector<std::string> types; // 1: linear, 0: full
        for (std::int64_t linear : list_of(*v)) types.emplace_back(linear ? "linear_attention" : "full_attention");
        Node list = list_node(types);
        list.where = v->where;
        out_.model.set("layer_types", list);
      }
    } else {
      put("full_attention_interval", "1", file_);
    }
    if (std::optional<Node> v = value("moe_layer_freq"); v && given("num_experts")) {
      std::vector<std::int64_t> dense;
      if (is_integer(*v)) {
        std::int64_t every = as_int(*v, 1, 4096);
        for (std::int64_t i = 0; i < layers && layers <= 4096; ++i)
          if (i % every != 0) dense.push_back(i);
      } else {
        std::vector<std::int64_t> moe = list_of(*v);
        for (std::size_t i = 0; i < moe.size(); ++i)
          if (!moe[i]) dense.push_back(static_cast<std::int64_t>(i));
      }
      if (!dense.empty()) {
        Node list = list_node(dense);
        list.where = v->where;
        out_.model.set("mlp_only_layers", list);
      }
    }
  }

  void defaults() {
    put("tie_word_embeddings", flag("untie_embeddings_and_output_weights") ? "false" : "true", file_);
    put_default("rms_norm_eps", "1e-5");
    std::int64_t heads = integer("num_attention_heads", 0), hidden = integer("hidden_size", 0);
    if (heads > 0) put_default("head_dim", std::to_string(hidden / heads));
    if (!flag("group_query_attention") && heads > 0) put("num_key_value_heads", std::to_string(heads), file_);
    std::int64_t ffn = flag("swiglu") ? hidden * 8 / 3 / 64 * 64 : 4 * hidden;
    put_default("intermediate_size", std::to_string(ffn));
    if (given("num_experts")) {
      put_default("moe_intermediate_size", out_.model.find("intermediate_size")->text);
      put_default("num_experts_per_tok", "2");
      put_default("router_aux_loss_coef", "0");
      put_default("moe_shared_expert_gate", "false");
      put_default("moe_router_dtype", "bf16"); // unset: the dtype of the activations
      if (flag("moe_router_pre_softmax")) put("norm_topk_prob", "false", file_);
    }
    if (given("linear_attention_freq")) {
      for (auto [key, text] : std::initializer_list<std::pair<const char*, const char*>>{
               {"linear_num_key_heads", "16"}, {"linear_num_value_heads", "32"}, {"linear_key_head_dim", "128"},
               {"linear_value_head_dim", "128"}, {"linear_conv_kernel_dim", "4"}})
        put_default(key, text);
      std::optional<Node> variant = value("experimental_attention_variant");
      put("linear_attention_type", variant && variant->text == "gdn2" ? "gdn2" : "gdn", file_);
    }
    std::optional<Node> position = value("position_embedding_type");
    bool rope = flag("use_rotary_position_embeddings") || (position && (position->text == "rope" || position->text == "mrope"));
    put("position_embedding_type", rope ? "rope" : "none", file_);
    if (!rope && !(position && position->text == "none"))
      note("learned position embeddings are not modelled: their parameters are not counted");
    if (!flag("swiglu")) note("--swiglu is not given: the MLP is read as SwiGLU all the same, other activations have no op list");
    std::optional<Node> norm = value("normalization");
    if (!norm || norm->text != "RMSNorm") note("--normalization RMSNorm is not given: norms are read as RMSNorm all the same");
    if (!flag("disable_bias_linear")) note("--disable-bias-linear is not given: biases of linear layers are not counted");
  }

  std::string file_;
  std::map<std::string, Option> seen_ = {};
  MegatronArguments out_ = {};
};

} // namespace

MegatronArguments read_megatron_arguments(std::string_view text, const std::string& file) {
  return Reader(text, file).read();
}

} // namespace gdn::config
