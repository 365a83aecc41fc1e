#pragma once
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "model/modules.h"
#include "model/validate.h"

// The rules, one file a subject. A rule is a condition and one call; its name carries the row of
// the subject's list it comes from.
namespace gdn::model::rules {

struct Check {
  Check(const config::Model& model, const config::Run& run);

  const config::Model& model;
  const config::Run& run;
  const config::StackSettings& settings;
  std::vector<Violation> found = {};

  // Derived once.
  bool megatron;                   // stack megatron: rules about its software apply
  bool selective, full;            // granularity after the stack's normalisation
  std::vector<ModuleName> modules; // listed under selective granularity
  bool has_gdn, has_gdn2, has_attention, has_moe, has_dense;
  std::string variant; // experimental_attention_variant, alias resolved; "" for none
  bool fp8;

  bool lists(std::string_view name) const; // under selective granularity
  bool offloads(std::string_view name) const;
  bool graphs() const { return run.cuda_graph_impl != "none"; }
  bool captured(std::string_view scope) const; // scope listed, or everything captured
  bool captures_whole_layers() const;
  // Whether context parallelism of GDN splits heads: everywhere but in dev's chunkwise mode.
  bool splits_heads() const;

  void reject(std::string rule, Exception exception, std::string key, std::string value,
              std::string message, std::string allowed = {}, std::string hint = {});
  void tolerate(std::string rule, Exception exception, std::string key, std::string value,
                std::string message, std::string hint = {});
  void warn(std::string rule, std::string key, std::string value, std::string message,
            std::string hint = {});
};

// In the order in which the stack meets them.
void check_arguments(Check& c); // command line and world size
void check_variant_and_heads(Check& c);
void check_gdn_dimensions(Check& c);
void check_gdn_construction(Check& c); // called by check_construction
void check_gdn_forward(Check& c);      // called by check_forward
void check_recompute(Check& c);
void check_offload(Check& c);
void check_cuda_graphs(Check& c);
void check_expert_overlap(Check& c);
void check_overlap(Check& c);
void check_optimizer(Check& c);
void check_construction(Check& c); // pipeline split, experts, GDN module
void check_forward(Check& c);      // errors of the first training step

std::string number(std::int64_t n);
std::string number(double x);
bool contains(const std::vector<std::string>& list, std::string_view name);
// Compares dotted versions by their leading numbers: "2.6.0dev0" is at least "2.6".
bool version_at_least(std::string_view version, std::string_view minimum);

} // namespace gdn::model::rules
