#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "config/model.h"
#include "config/run.h"
#include "core/dtype.h"
#include "core/units.h"

// The parameter table of a model: every weight under its canonical name, with the named sections of
// its sharded dimension. No stack owns weights: op lists refer to (parameter, section), checkpoints
// load across stacks and topologies.
namespace gdn::model {

enum class Part { Text, Vision, Mtp };
enum class ParameterGroup { Dense, RoutedExpert };

// How a dimension is divided: Column, Row and Vocab by tp, ExpertColumn and ExpertRow by etp (their
// first dimension, the experts, also by ep).
enum class ShardRule { Replicated, Column, Row, Vocab, ExpertColumn, ExpertRow };

// Weight: the run's dtype. Gate (A_log, dt_bias): fp32 in stack native, the run's dtype in
// megatron. Buffer: an fp32 buffer without gradient (the router's expert bias).
enum class DTypeGroup { Weight, Gate, Buffer };

enum class Init {
  Normal,       // N(0, 0.02)
  ScaledNormal, // N(0, 0.02 / sqrt(2 L)): projections back to the residual stream
  Zero,
  One,
  Conv,      // uniform +-conv_init, or torch's default +-1/sqrt(K)
  ALog,      // log of uniform A_init_range
  Gdn2DtBias // inverse softplus of a step log-uniform in [1e-3, 0.1], floor 1e-4
};

// Where in the pipeline a parameter lives.
enum class Place { First, Layer, Last };

struct Section {
  std::string name;      // "q", "k", "v", "z", "beta", "alpha", "gate", "up", ...
  std::int64_t size = 0; // along Parameter::dim, unsharded
  ShardRule rule = ShardRule::Replicated;
};

struct Parameter {
  std::string name;  // "layers.3.gdn.in_proj", "embedding.word", "mtp.0.eh_proj"
  std::string local; // relative to its layer: "gdn.in_proj"; else the name
  Part part = Part::Text;
  ParameterGroup group = ParameterGroup::Dense;
  Place place = Place::Layer;
  std::int64_t layer = -1;         // decoder layer, or depth for Part::Mtp; -1: none
  std::vector<std::int64_t> shape; // row-major; linears are [out, in], experts [experts, out, in]
  int dim = 0;                     // the dimension that the sections divide
  std::vector<Section> sections;   // their sizes add up to shape[dim]
  // 0: sections lie one after the other and are sharded one by one. n > 0: rows repeat n times
  // (sections of one query group each), and a rank takes consecutive rows (linear_qkv).
  std::int64_t repeats = 0;
  DTypeGroup dtype = DTypeGroup::Weight;
  bool trainable = true;
  Init init = Init::Normal;

  std::int64_t elements() const;
  ShardRule rule() const { return sections.front().rule; } // all sections of a parameter share it
  // Throws Error{Internal} naming the parameter when there is no such section.
  const Section& section(std::string_view section_name) const;
};

struct ParameterTable {
  std::vector<Parameter> parameters; // in model order

  const Parameter* find(std::string_view name) const; // nullptr when absent
  // Throws Error{Config} naming the parameter and the nearest spelling.
  const Parameter& at(std::string_view name) const;
};

// Every part of the model, vocabulary unpadded: what a published total counts.
ParameterTable parameter_table(const config::Model& model);
// What a run builds: padded vocabulary, no vision tower where it is absent, no MTP where it is not
// trained, frozen parts marked.
ParameterTable parameter_table(const config::Model& model, const config::Run& run);

// Rows of the embedding: the vocabulary rounded up to vocab_divisor (128) x tp; divisor 0: as it
// is.
std::int64_t padded_vocabulary(const config::Model& model, const config::Run& run);

struct ParameterTotals {
  std::int64_t text = 0, vision = 0, mtp = 0;
  std::int64_t routed_text = 0, routed_mtp = 0; // routed experts, inside text and mtp
  std::int64_t sum() const { return text + vision + mtp; }
};
ParameterTotals totals(const ParameterTable& table);

// Text parameters that one token uses (no MTP, no vision): routed experts count top_k / experts.
struct ActiveParameters {
  std::int64_t both = 0;                    // the convention of model cards
  std::int64_t without_input_embedding = 0; // FLOP accounting: the input embedding is a gather
  std::int64_t without_both = 0;
};
ActiveParameters active_parameters(const config::Model& model);

// ------------------------------------------------------------------------------- sharding ----

// Shape of a rank's shard. Throws Error{Config} naming parameter, section, size and divisor.
std::vector<std::int64_t> local_shape(const Parameter& parameter, const config::Parallel& parallel);
std::int64_t local_elements(const Parameter& parameter, const config::Parallel& parallel);

// Rows [first, first + count) along Parameter::dim, in the order in which rank `shard` (of tp, or
// of etp for experts) stores them: each section split, then concatenated.
struct RowRange {
  std::int64_t first = 0, count = 0;
  friend bool operator==(const RowRange&, const RowRange&) = default;
};
std::vector<RowRange> shard_rows(const Parameter& parameter, const config::Parallel& parallel,
                                 std::int64_t shard);

// Attention heads of one rank. With tp > kv_heads every kv head is computed on `kv_replicas` ranks
// (Megatron-LM gathers the evenly sharded linear_qkv output and slices it).
struct HeadsPerRank {
  std::int64_t query = 0, gate = 0, kv = 0, kv_replicas = 1;
};
HeadsPerRank attention_heads_per_rank(const config::AttentionShape& attention, std::int64_t tp);

// A parameter as one pipeline rank holds it.
struct LocalParameter {
  const Parameter* parameter = nullptr; // into the table
  std::int64_t elements = 0;            // of this rank
  std::int64_t tensors = 1;             // separately stored tensors (local experts)
  std::int64_t virtual_stage = 0;
  bool copy = false; // a second instance (the last stage's word embedding)
};
// Layers of the rank's chunks; embedding and vision on the first; final norm, head and MTP on the
// last. With pp > 1 the last rank also holds a copy of the word embedding for MTP, and one for a
// tied head (Megatron-LM allocates both when a tied model has MTP).
std::vector<LocalParameter> local_parameters(const ParameterTable& table,
                                             const config::Model& model, const config::Run& run,
                                             std::int64_t pipeline_rank);

struct RankElements {
  std::int64_t dense = 0, expert = 0;
  std::int64_t total() const { return dense + expert; }
};
RankElements rank_elements(const ParameterTable& table, const config::Model& model,
                           const config::Run& run, std::int64_t pipeline_rank);

// The dtype in which a run stores the parameter.
DType stored_dtype(const Parameter& parameter, const config::Run& run);

} // namespace gdn::model
