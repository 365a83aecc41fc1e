// The scratch that op lists plan for a packed run, against what the kernels ask for when a batch with so many documents comes.
#include <doctest/doctest.h>

#include <algorithm>
#include <optional>
#include <random>

#include "core/error.h"
#include "kernels/attention/core.h"
#include "kernels/describe/own.h"
#include "kernels/gdn/chunk_backward.h"
#include "kernels/gdn/chunk_forward.h"
#include "kernels/gdn/gdn2.h"
#include "kernels/gdn/gdn_pre.h"
#include "model/dims.h"
#include "model/stack_lists.h"

using namespace gdn;
using config::LayerKind;
using config::MlpKind;
using model::OpKind;

namespace {

config::Model small_model(std::int64_t head_dim = 16) {
  config::Model m;
  m.hidden = 32;
  m.vocab = 64;
  m.ffn = 48;
  m.gdn.key_heads = 2;
  m.gdn.value_heads = 4;
  m.gdn.key_head_dim = m.gdn.value_head_dim = head_dim;
  m.attention.heads = 4;
  m.attention.kv_heads = 2;
  m.attention.head_dim = 16;
  return m;
}

config::Run packed_run(const char* stack, std::int64_t tokens, std::optional<std::int64_t> max_documents = {}, std::int64_t cp = 1) {
  config::Run r;
  r.stack = stack;
  r.seq = tokens;
  r.settings.packed = true;
  r.max_documents = max_documents;
  r.parallel.cp = r.parallel.gpus = cp;
  r.cp_comm_type = "all_gather";
  return r;
}

// Bytes that the kernels of an op ask for when `tokens` tokens are `documents` documents.
Bytes asked(const model::OpList& list, const model::Op& op, int step, std::int64_t tokens, std::int64_t documents) {
  if (op.kind == OpKind::CoreAttention)
    return step < 0 ? 0 : kernels::attention_backward_scratch(tokens, documents, std::get<model::AttentionAttr>(op.attr).heads);
  if (op.kind != OpKind::Rule && op.kind != OpKind::Gdn2Rule && op.kind != OpKind::GdnPre) return 0;
  kernels::GdnShape s = kernels::gdn_shape_of(list, op);
  CHECK(s.tokens == tokens);
  s.sequences = documents;
  if (op.kind == OpKind::Rule) return step < 0 ? kernels::gdn_chunk_forward_scratch(s) : kernels::gdn_chunk_backward_scratch(s);
  if (step < 0) return 0;
  return op.kind == OpKind::Gdn2Rule ? kernels::gdn2_backward_scratch(s) : kernels::gdn_pre_backward_scratch(s);
}

struct Fit {
  int ops = 0, short_of = 0; // ops that ask for scratch by documents, and those of them that were given less
};
Fit fit(const model::OpList& list, std::int64_t tokens, std::int64_t documents) {
  Fit f;
  for (const model::Op& op : list.ops)
    for (int step = -1; step < static_cast<int>(op.steps.size()); ++step) {
      const Bytes needed = asked(list, op, step, tokens, documents);
      f.ops += needed > 0;
      f.short_of += needed > kernels::own_provider().work(list, op, step).scratch;
    }
  return f;
}

} // namespace

TEST_CASE("documents: the bound of a packed run") {
  CHECK(model::most_sequences(packed_run("native", 4096)) == 64);
  CHECK(model::most_sequences(packed_run("native", 8192)) == 128);
  CHECK(model::most_sequences(packed_run("native", 8200)) == 129);
  CHECK(model::most_sequences(packed_run("native", 300)) == 64);
  CHECK(model::most_sequences(packed_run("native", 40)) == 40); // no more than tokens
  CHECK(model::most_sequences(packed_run("native", 4096, 7)) == 7);
  CHECK(model::most_sequences(packed_run("native", 4096, 5000)) == 4096);
  config::Run listed = packed_run("native", 4096);
  listed.documents = {{2000, 1}, {100, 20}, {96, 1}};
  CHECK(model::most_sequences(listed) == 22);
  CHECK(model::Dims::of(small_model(), listed).sequences == 22);
  listed.max_documents = 21;
  CHECK_THROWS_WITH_AS(model::Dims::of(small_model(), listed), doctest::Contains("document_lengths lists 22 documents, max_documents is 21"), Error);
  config::Run plain;
  plain.micro_batch = 3;
  CHECK(model::most_sequences(plain) == 3);
  plain.max_documents = 50;
  CHECK_THROWS_WITH_AS(model::Dims::of(small_model(), plain), doctest::Contains("max_documents = 50: the micro-batches are not packed"), Error);
}

TEST_CASE("documents: any number up to the bound fits the scratch that was planned, in every layer of both stacks") {
  const config::Model m = small_model();
  for (const char* stack : {"native", "megatron"})
    for (const std::int64_t tokens : {1, 40, 64, 300, 4096, 8192})
      for (const std::optional<std::int64_t> bound : {std::optional<std::int64_t>(), {1}, {7}, {200}, {100000}})
        for (const LayerKind mixer : {LayerKind::Gdn, LayerKind::Gdn2, LayerKind::Attention}) {
          const config::Run run = packed_run(stack, tokens, bound);
          const model::OpList list = model::decoder_layer(m, run, mixer, MlpKind::Dense);
          const std::int64_t most = model::most_sequences(run);
          CAPTURE(stack);
          CAPTURE(tokens);
          CAPTURE(most);
          CAPTURE(list.name);
          for (std::int64_t documents : {std::int64_t{1}, most / 2, most - 1, most}) {
            if (documents < 1) continue;
            const Fit f = fit(list, tokens, documents);
            CHECK(f.ops > 0);
            CHECK(f.short_of == 0);
          }
          if (4 * most <= tokens) CHECK(fit(list, tokens, tokens).short_of > 0); // or nothing above says anything
        }
}

// Context-parallel ranks see the documents of all tokens: in the rule after its exchange, in attention after the gather.
TEST_CASE("documents: as many fit where ranks share the tokens") {
  const config::Model m = small_model();
  for (const char* stack : {"native", "megatron"})
    for (const char* exchange : {"all_gather", "a2a"})
      for (const LayerKind mixer : {LayerKind::Gdn, LayerKind::Attention})
        for (const std::int64_t most : {3, 64, 512}) {
          config::Run run = packed_run(stack, 512, most, 2);
          run.cp_comm_type = exchange;
          const Fit f = fit(model::decoder_layer(m, run, mixer, MlpKind::Dense), 512, most);
          CHECK(f.ops > 0);
          CHECK(f.short_of == 0);
        }
}

TEST_CASE("documents: the chunks of random documents, one by one, have their place") {
  // 128 columns of key and value, backward, per chunk and value head: P, 9 factors a row, S and dS twice 64 x 128, Z and E twice
  // 64 x 64, bf16 but for the factors.
  constexpr std::int64_t kChunkHead = 64 * 64 * 2 + 9 * 64 * 4 + 2 * (2 * 64 * 128 * 2) + 2 * (2 * 64 * 64 * 2);
  const config::Model m = small_model(128);
  std::mt19937_64 random(5);
  auto below = [&](std::int64_t n) { return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(n)); };
  for (int i = 0; i < 300; ++i) {
    const std::int64_t tokens = 1 + below(3000);
    const config::Run run = packed_run("native", tokens);
    const std::int64_t most = model::most_sequences(run), documents = i % 3 == 0 ? most : 1 + below(most);
    std::vector<std::int64_t> cuts{0, tokens}; // documents - 1 others between them
    while (static_cast<std::int64_t>(cuts.size()) <= documents) {
      const std::int64_t at = below(i % 2 == 0 ? tokens : std::min<std::int64_t>(tokens, 2 * documents));
      if (std::find(cuts.begin(), cuts.end(), at) == cuts.end()) cuts.push_back(at);
    }
    std::sort(cuts.begin(), cuts.end());
    std::int64_t chunks = 0;
    for (size_t d = 0; d + 1 < cuts.size(); ++d) chunks += (cuts[d + 1] - cuts[d] + 63) / 64;
    CAPTURE(tokens);
    CAPTURE(documents);
    CHECK(chunks <= kernels::gdn_chunk_capacity(tokens, documents));
    const model::OpList list = model::decoder_layer(m, run, LayerKind::Gdn, MlpKind::Dense);
    for (const model::Op& op : list.ops)
      if (op.kind == OpKind::Rule) CHECK(chunks * m.gdn.value_heads * kChunkHead <= kernels::own_provider().work(list, op, 0).scratch);
  }
}
