#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "model/parameters.h"

// The parameters of each kind of layer, in the order in which the layer uses them.
namespace gdn::model {

// Appends parameters that share a prefix, part, place and layer index.
class ParameterList {
public:
  ParameterList(std::vector<Parameter>& out, std::string prefix, Part part, Place place,
                std::int64_t layer)
      : out_(out), prefix_(std::move(prefix)), part_(part), place_(place), layer_(layer) {}

  // A vector or matrix without named sections. `dim`: the sharded dimension.
  Parameter& add(std::string local, std::vector<std::int64_t> shape, ShardRule rule, int dim = 0,
                 Init init = Init::Normal);
  // Sections divide dimension `dim` of `shape`; their sizes must add up to it.
  Parameter& add_sections(std::string local, std::vector<std::int64_t> shape, int dim,
                          std::vector<Section> sections, Init init = Init::Normal);
  // Weight and bias of a vision-tower linear [out, in].
  void add_biased_linear(const std::string& local, std::int64_t out, std::int64_t in,
                         ShardRule rule);
  // Weight and bias of a LayerNorm.
  void add_layer_norm(const std::string& local, std::int64_t width);

private:
  std::vector<Parameter>& out_;
  std::string prefix_;
  Part part_;
  Place place_;
  std::int64_t layer_;
};

// Token mixers; the input norm is not among them.
void add_gdn(ParameterList& list, const config::Model& model);
void add_gdn2(ParameterList& list, const config::Model& model);
void add_attention(ParameterList& list, const config::Model& model);

// Mixers of models without op lists, known by their parameters only (src/model/unmodelled.cpp).
void add_kda(ParameterList& list, const config::Model& model);
void add_mla(ParameterList& list, const config::Model& model);
void add_jet_block(ParameterList& list, const config::Model& model);

void add_moe(ParameterList& list, const config::Model& model);
void add_dense_mlp(ParameterList& list, const config::Model& model);

// input_norm, mixer, mlp_norm, MoE or MLP.
void add_layer(ParameterList& list, const config::Model& model, config::LayerKind mixer,
               config::MlpKind mlp);

void add_vision(ParameterList& list, const config::VisionShape& vision);

} // namespace gdn::model
