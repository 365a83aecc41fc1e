#include <doctest/doctest.h>

#include "tests/program/lists.h"

using namespace gdn;
using namespace gdn::test;
using config::Build;
using config::CrossEntropy;

namespace {

// h 2048, a vocabulary that needs no padding.
config::Model with_vocab(std::int64_t vocab, std::int64_t mtp = 0) {
  config::Model m = reference_model();
  m.vocab = vocab;
  m.mtp_layers = mtp;
  return m;
}

Traced head(const config::Model& m, const config::Run& run, const std::vector<std::string>& modules = {}) {
  return traced(model::megatron::head_unit(m, run), modules, false);
}

// Highest level of the category while events of `pass` run, in bytes a token.
double logits_peak(const Traced& t, program::Pass pass) {
  std::vector<Bytes> change(t.trace.events.size() + 1, 0);
  for (const program::Buffer& b : t.trace.buffers)
    if (b.category == Category::Logits) {
      change[static_cast<size_t>(b.alloc)] += b.bytes;
      change[static_cast<size_t>(b.last) + 1] -= b.bytes;
    }
  Bytes level = 0, high = 0;
  for (size_t e = 0; e < t.trace.events.size(); ++e) {
    level += change[e];
    if (t.trace.events[e].pass == pass) high = std::max(high, level);
  }
  return static_cast<double>(high) / static_cast<double>(t.list.tokens);
}

double logits_retained(const Traced& t) {
  Bytes bytes = 0;
  for (const program::Buffer& b : t.trace.buffers)
    if (b.category == Category::Logits && !b.gradient && b.last >= t.trace.forward_end) bytes += b.bytes;
  return static_cast<double>(bytes) / static_cast<double>(t.list.tokens);
}

} // namespace

TEST_CASE("cross entropy: what each form keeps and peaks at, in multiples of the padded vocabulary") {
  const double Vp = 248320;
  struct Row {
    CrossEntropy form;
    double retained, forward, backward;
  };
  const Row rows[] = {{CrossEntropy::Unfused, 4, 6, 6},       // fp32 softmax; + bf16 logits; + their bf16 gradient
                      {CrossEntropy::FusedNative, 4, 6, 6},
                      {CrossEntropy::FusedTe, 2, 2, 2},       // the gradient lies over the logits
                      {CrossEntropy::ChunkedLinear, 0, 0, 0}};
  for (const Row& row : rows) {
    CAPTURE(config::name_of(row.form));
    config::Run run = one_gpu(Build::Te);
    run.cross_entropy = row.form;
    run.loss_chunk = 1024;
    const Traced t = head(with_vocab(248320), run);
    CHECK(logits_retained(t) == row.retained * Vp);
    CHECK(logits_peak(t, program::Pass::Forward) == row.forward * Vp);
    CHECK(logits_peak(t, program::Pass::Backward) == row.backward * Vp);
  }
}

TEST_CASE("logits of 8,192 tokens and 248,320 entries in fp32, chunked or not, with or without modules") {
  config::Run run = one_gpu(Build::Te);
  const config::Model m = with_vocab(248320);
  const Traced t = head(m, run);
  CHECK(t.list.storage_of(t.list.find_tensor("loss_softmax")).bytes == 8136949760);
  CHECK(head(m, run, {"moe", "gdn_norm_out", "gdn_qkv", "layernorm"}).levels.forward.bytes == t.levels.forward.bytes);
  // A fused linear + cross entropy holds one chunk at a time.
  run.cross_entropy = CrossEntropy::ChunkedLinear;
  run.loss_chunk = 1024;
  const Traced chunked = head(m, run);
  const model::Op& loss = op_of(chunked, "linear_cross_entropy");
  CHECK(model::upstream_provider().work(chunked.list, loss, -1).scratch == Bytes{1024} * 248320 * 4);
  CHECK(chunked.list.find_tensor("logits") < 0);
  // 11,600 tokens whose logits exist before the loss: chunking the loss cannot help.
  const Traced all = head(m, one_gpu(Build::Te, "main", 11600));
  CHECK(all.list.storage_of(all.list.find_tensor("loss_softmax")).bytes == 11522048000);
}

TEST_CASE("vocabulary parallel loss: local rows of the padded vocabulary, small reductions") {
  config::Run run = one_gpu(Build::Te);
  run.parallel.tp = run.parallel.gpus = 4;
  run.parallel.sequence_parallel = true;
  const Traced t = head(with_vocab(151936), run);
  CHECK(t.list.tensor(t.list.find_tensor("logits")).shape == std::vector<std::int64_t>{8192, 152064 / 4});
  CHECK(op_of(t, "lm_head").collectives[0].kind == model::CollectiveKind::AllGather);
  CHECK(op_of(t, "cross_entropy").collectives.size() == 3);
  CHECK(op_of(t, "cross_entropy").collectives[0].bytes == 4 * 8192);
  // The head keeps its input as a sequence-parallel shard.
  CHECK(t.list.tensor(op_of(t, "lm_head").inputs[0]).rows() == 2048);
}

TEST_CASE("final norm: its input, a statistic, and its output through the head's weight gradient") {
  config::Run run = one_gpu(Build::Te);
  run.cross_entropy = CrossEntropy::FusedTe;
  const Traced t = head(with_vocab(151936), run);
  // x, y, statistic, labels (the shard of the table is a parameter), logits.
  CHECK(retained_per_token(t) == 4096 + 4096 + 4 + 2 * 151936);
}

TEST_CASE("embedding: ids alone are kept; a mask where there is dropout; rows are scattered with SP") {
  const config::Model m = with_vocab(151936);
  config::Run run = one_gpu(Build::Te);
  auto embedding = [&] { return traced(model::megatron::embedding_unit(m, run), std::vector<std::string>{}, false); };
  CHECK(retained_per_token(embedding()) == 8);
  run.hidden_dropout = 0.1;
  CHECK(retained_per_token(embedding()) == 8 + 2048);
  run.hidden_dropout = 0;
  run.parallel.tp = run.parallel.gpus = 2;
  run.parallel.sequence_parallel = true;
  const Traced t = embedding();
  CHECK(t.list.tensor(t.list.output).rows() == 4096);
  CHECK(op_of(t, "embedding").collectives[0].kind == model::CollectiveKind::ReduceScatter);
  // torch's dense gradient of the local table is a buffer of the run.
  CHECK(model::upstream_provider().work(t.list, op_of(t, "embedding"), 0).scratch == (152064 / 2 + 8192) * 2048 * 2);
}

TEST_CASE("multi-token prediction: entry norms, merge, a layer of the last kind, a loss of its own") {
  config::Run run = one_gpu(Build::Te);
  const double layer = retained_per_token(whole_layer(reference_model(), run, config::LayerKind::Attention, config::MlpKind::Moe));
  const double without = retained_per_token(head(with_vocab(151936), run));
  const Traced one = head(with_vocab(151936, 1), run);
  // e and y (2h each), their statistics, the pair (4h), the layer, its output's statistic and 2h input
  // of the final norm, shifted ids, softmax, mask and label ids. The hidden states leave in one tensor
  // of twice the rows, which is what the heads keep: 2h more.
  const double depth = 4096 + 4096 + 4 + 4 + 8192 + layer + 4096 + 4 + 8 + (4 * 151936 + 1 + 8) + 4096;
  CHECK(retained_per_token(one) - without == depth);
  CHECK(one.list.find_op("mtp0.core_attention") >= 0); // the last decoder layer is attention
  CHECK(one.list.find_op("mtp0.eh_proj") >= 0);
  CHECK(one.list.tensor(one.list.find_tensor("y_all")).rows() == 2 * 8192);
  const double two = retained_per_token(head(with_vocab(151936, 2), run));
  // The second depth starts from the first one's output, which its entry norm keeps.
  CHECK(two - retained_per_token(one) == depth);
  // A run that does not train it has none of it.
  run.train_mtp = false;
  CHECK(retained_per_token(head(with_vocab(151936, 1), run)) == without);
}

TEST_CASE("multi-token prediction under TP: the merged states are gathered and scattered again") {
  config::Run run = one_gpu(Build::Te);
  run.parallel.tp = run.parallel.gpus = 2;
  run.parallel.sequence_parallel = true;
  const Traced t = head(with_vocab(151936, 1), run);
  auto shape = [&](const char* tensor) { return t.list.tensor(t.list.find_tensor(tensor)).shape; };
  CHECK(shape("mtp0.eh_out") == std::vector<std::int64_t>{8192, 1024});
  CHECK(shape("mtp0.eh_full") == std::vector<std::int64_t>{8192, 2048});
  CHECK(shape("mtp0.eh_shard") == std::vector<std::int64_t>{4096, 2048});
  for (const program::Buffer& b : t.trace.buffers)
    if (!b.gradient && t.list.tensor(b.tensor).name == "mtp0.eh_full") CHECK(b.last < t.trace.forward_end);
}

TEST_CASE("tied embeddings: head and embedding use one parameter") {
  config::Model m = with_vocab(151936);
  m.tied_embeddings = true;
  CHECK(op_of(head(m, one_gpu(Build::Te)), "lm_head").params[0].name == "embedding.word");
}
