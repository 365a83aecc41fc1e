#include <algorithm>

#include <fmt/format.h>

#include "config/import.h"
#include "config/model_io.h"

namespace gdn::config {

namespace {

// Keys of a configuration that carry no size: training-time noise, token ids, generation settings.
// Anything else that is not read becomes a note.
const std::vector<std::string> kWithoutSize{
    "_name_or_path", "architectures", "bos_token_id", "eos_token_id", "pad_token_id", "chunk_size_feed_forward",
    "dtype", "torch_dtype", "id2label", "label2id", "initializer_range", "is_encoder_decoder", "output_attentions",
    "output_hidden_states", "output_router_logits", "problem_type", "return_dict", "transformers_version", "use_cache",
    "model_type", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id",
    "max_position_embeddings", "attention_dropout", "hidden_act", "mamba_ssm_dtype", "output_gate_type",
    "language_model_only", "mtp_use_dedicated_embeddings"};

bool contains(const std::vector<std::string>& list, const std::string& word) {
  return std::find(list.begin(), list.end(), word) != list.end();
}

class Importer {
public:
  Importer(const Node& root, const std::string& name, std::vector<std::string>& notes)
      : root_(root), notes_(notes) {
    Fields check(root);
    type_ = as_choice(required(root, "model_type"),
                      {"qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "olmo_hybrid"});
    const Node* nested = root.find("text_config");
    text_ = nested ? nested : &root;
    Fields check_text(*text_);
    out_.where = root.where;
    out_.set("name", Node::scalar(name, root.where, "name"));
    out_.set("source", Node::scalar(fmt::format("Hugging Face config.json, model_type {}", type_), root.where, "source"));
  }

  Node build() {
    for (const char* key : {"hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads"}) take(key, true);
    take("tie_word_embeddings", false);
    if (!out_.find("tie_word_embeddings")) copy("tie_word_embeddings", root_.find("tie_word_embeddings"));
    take("rms_norm_eps", false);
    require_silu();
    if (type_ == "olmo_hybrid") olmo();
    else qwen();
    vision();
    note_unread();
    return std::move(out_);
  }

private:
  static const Node& required(const Node& map, const char* key) {
    const Node* n = map.find(key);
    if (!n) map.fail(fmt::format("missing key {}", key));
    return *n;
  }
  void copy(const char* key, const Node* value) {
    if (value && !is_none(*value)) out_.set(key, *value);
  }
  // A key of the same name in the model file.
  void take(const char* key, bool needed) {
    used_.emplace_back(key);
    const Node* n = text_->find(key);
    if (needed) required(*text_, key);
    copy(key, n);
  }
  void say(const char* key, const std::string& value) { out_.set(key, Node::scalar(value, text_->where, key)); }

  void require_silu() {
    if (const Node* act = text_->find("hidden_act"))
      as_choice(*act, {"silu", "swish"});
  }

  void layer_types() {
    take("layer_types", false);
    take("full_attention_interval", false);
    if (out_.find("layer_types")) {
      out_.erase("full_attention_interval"); // says the same; the list is what transformers obeys
    } else if (!out_.find("full_attention_interval")) {
      say("full_attention_interval", "4");
      notes_.push_back("full_attention_interval: 4, the default of the class");
    }
  }

  void linear_sizes(bool needed) {
    for (const char* key : {"linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
                            "linear_value_head_dim", "linear_conv_kernel_dim"})
      take(key, needed);
  }

  void rope() {
    const Node* parameters = text_->find("rope_parameters");
    used_.insert(used_.end(), {"rope_parameters", "rope_theta", "partial_rotary_factor", "rope_scaling"});
    for (const char* key : {"rope_theta", "partial_rotary_factor"}) {
      copy(key, text_->find(key));
      if (parameters && parameters->kind == Node::Kind::Map) copy(key, parameters->find(key));
    }
  }

  void qwen() {
    layer_types();
    linear_sizes(true);
    take("num_key_value_heads", true);
    take("head_dim", true);
    take("attention_bias", false);
    rope();
    if (!out_.find("partial_rotary_factor")) say("partial_rotary_factor", "0.25"); // default of these classes
    take("attn_output_gate", false);
    if (!out_.find("attn_output_gate")) say("attn_output_gate", "true"); // these classes always gate
    for (const char* key : {"qk_layernorm", "layernorm_zero_centered_gamma"}) say(key, "true");
    take("mtp_num_hidden_layers", false);
    if (type_ == "qwen3_next" && !out_.find("mtp_num_hidden_layers"))
      notes_.push_back("mtp_num_hidden_layers: 0; a qwen3_next configuration does not say whether the checkpoint has MTP "
                       "weights, set mtp_num_hidden_layers=1 if it does");
    bool moe = type_ == "qwen3_next" || type_.starts_with("qwen3_5_moe");
    if (moe) experts();
    take("intermediate_size", !moe);
  }

  void experts() {
    for (const char* key : {"num_experts", "num_experts_per_tok", "moe_intermediate_size",
                            "shared_expert_intermediate_size"})
      take(key, true);
    take("norm_topk_prob", false);
    take("router_aux_loss_coef", false);
    take("mlp_only_layers", false);
    used_.emplace_back("decoder_sparse_step");
    if (const Node* step = text_->find("decoder_sparse_step")) {
      // Layer i is sparse if it is not listed as dense and (i+1) % step == 0.
      std::int64_t every = as_int(*step, 1, 4096), layers = as_int(required(*text_, "num_hidden_layers"), 1, 4096);
      if (every > 1) {
        std::vector<std::int64_t> dense;
        if (const Node* n = out_.find("mlp_only_layers")) dense = as_ints(*n, 0, layers - 1);
        for (std::int64_t i = 0; i < layers; ++i)
          if ((i + 1) % every != 0) dense.push_back(i);
        Node list = list_node(dense);
        list.where = step->where;
        out_.set("mlp_only_layers", list);
      }
    }
    if (const Node* n = out_.find("mlp_only_layers"); n && n->kind == Node::Kind::List && n->items.empty())
      out_.erase("mlp_only_layers");
  }

  // Sizes that a configuration leaves out are derived as the class derives them.
  void olmo() {
    layer_types();
    linear_sizes(false);
    std::int64_t heads = as_int(required(*text_, "num_attention_heads"), 1, 4096);
    std::int64_t hidden = as_int(required(*text_, "hidden_size"), 1, 1 << 20);
    auto size = [&](const char* key, std::int64_t otherwise) {
      if (const Node* n = out_.find(key)) return as_int(*n, 1, 1 << 20);
      say(key, std::to_string(otherwise));
      return otherwise;
    };
    std::int64_t key_heads = size("linear_num_key_heads", heads);
    size("linear_num_value_heads", heads);
    std::int64_t key_dim = size("linear_key_head_dim", 3 * hidden / (4 * key_heads));
    size("linear_value_head_dim", 2 * key_dim);
    size("linear_conv_kernel_dim", 4);
    take("num_key_value_heads", false);
    take("head_dim", false);
    if (!out_.find("head_dim")) say("head_dim", std::to_string(hidden / heads));
    take("attention_bias", false);
    used_.insert(used_.end(), {"linear_allow_neg_eigval", "linear_a_log_min", "linear_a_log_max", "linear_dt_min",
                               "linear_dt_max", "linear_dt_init_floor"}); // the rest only shape the initial weights
    const Node* negative = text_->find("linear_allow_neg_eigval");
    say("linear_allow_neg_eigval", !negative || as_bool(*negative) ? "true" : "false");
    say("qk_layernorm", "true");
    say("qk_layernorm_whole_vector", "true");
    rope();
    if (const Node* r = text_->find("rope_parameters"); r && is_none(*r)) say("position_embedding_type", "none");
    take("intermediate_size", true);
  }

  void vision() {
    const Node* v = root_.find("vision_config");
    if (!v || is_none(*v)) return;
    Fields check(*v);
    Node tower;
    for (const char* key : {"depth", "hidden_size", "num_heads", "intermediate_size", "out_hidden_size"})
      tower.set(key, required(*v, key));
    tower.where = v->where;
    tower.path = v->path;
    out_.set("vision_config", tower);
  }

  void note_unread() {
    std::vector<std::string> unread;
    for (const Node* map : {text_, &root_}) {
      for (const Entry& e : map->entries) {
        bool structure = e.key == "text_config" || e.key == "vision_config" || e.key == "tie_word_embeddings";
        if (!structure && !contains(used_, e.key) && !contains(kWithoutSize, e.key) && !contains(unread, e.key))
          unread.push_back(e.key);
      }
      if (text_ == &root_) break;
    }
    if (!unread.empty()) notes_.push_back(fmt::format("not read: {}", fmt::join(unread, ", ")));
  }

  const Node& root_;
  const Node* text_ = nullptr;
  std::string type_ = {};
  Node out_ = {};
  std::vector<std::string> used_ = {};
  std::vector<std::string>& notes_;
};

} // namespace

Node model_from_hugging_face(const Node& config, const std::string& name, std::vector<std::string>& notes) {
  return Importer(config, name, notes).build();
}

} // namespace gdn::config
