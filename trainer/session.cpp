#include "trainer/session.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include <fmt/format.h>

#include "core/error.h"
#include "model/dims.h"
#include "program/transfers.h"
#include "trainer/prediction.h"

namespace gdn::trainer {

void check_batch(const Batch& b, std::int64_t tokens, std::int64_t vocab) {
  auto fail = [](std::string message) { throw Error(ErrorCode::Config, "batch: " + std::move(message)); };
  if (static_cast<std::int64_t>(b.ids.size()) != tokens || b.labels.size() != b.ids.size())
    fail(fmt::format("{} ids and {} labels, expected {}", b.ids.size(), b.labels.size(), tokens));
  if (b.sequences.empty() || b.sequences.front() != 0) fail("sequence offsets must start at 0");
  for (size_t i = 1; i < b.sequences.size(); ++i)
    if (b.sequences[i] <= b.sequences[i - 1])
      fail(fmt::format("sequence offsets must strictly increase: {} after {}", b.sequences[i], b.sequences[i - 1]));
  if (b.sequences.back() != tokens) fail(fmt::format("sequence offsets end at {}, but there are {} tokens", b.sequences.back(), tokens));
  for (size_t i = 0; i < b.ids.size(); ++i) {
    if (b.ids[i] < 0 || b.ids[i] >= vocab) fail(fmt::format("token {} has id {}; ids are 0 to {}", i, b.ids[i], vocab - 1));
    if (b.labels[i] != -100 && (b.labels[i] < 0 || b.labels[i] >= vocab))
      fail(fmt::format("token {} has label {}; labels are 0 to {}, or -100 to ignore one", i, b.labels[i], vocab - 1));
  }
}

void check_sequences(const Batch& b, const config::Run& run, std::int64_t index) {
  const auto found = static_cast<std::int64_t>(b.sequences.size()) - 1, bound = model::most_sequences(run);
  if (found <= bound) return;
  if (!run.settings.packed)
    throw Error(ErrorCode::Config, fmt::format("batch: micro-batch {} has {} sequences, micro_batch_size is {}", index, found, bound),
                "a micro-batch of documents needs packed: true");
  throw Error(ErrorCode::Config, fmt::format("batch: micro-batch {} has {} documents, max_documents is {}", index, found, bound),
              fmt::format("--set max_documents={} makes room for them", found));
}

std::vector<std::int64_t> dense_sequences(std::int64_t batch, std::int64_t seq) {
  std::vector<std::int64_t> offsets;
  for (std::int64_t i = 0; i <= batch; ++i) offsets.push_back(i * seq);
  return offsets;
}

namespace {

std::unique_ptr<Ranks> rank_alone(const config::Parallel& parallel) {
  Alone world;
  return std::make_unique<Ranks>(world, parallel);
}

bool has_experts(const config::Model& m) { return std::find(m.mlps.begin(), m.mlps.end(), config::MlpKind::Moe) != m.mlps.end(); }

// The groups that exchange more than a few numbers: of ops, and of gradients and parameters.
void connect_groups(const Ranks& ranks, const config::Model& model, bool embedding_copied) {
  for (const model::Group g : {model::Group::Tp, model::Group::Cp}) ranks.group(g).connect();
  if (has_experts(model))
    for (const model::Group g : {model::Group::Ep, model::Group::Etp, model::Group::Edp}) ranks.group(g).connect();
  ranks.dense_replicas().connect();
  if (embedding_copied) ranks.pipeline_ends().connect();
}

} // namespace

Session::Session(config::Model model, config::Run run, Device& device, Bytes budget, const model::Provider* laid_out_for, const Ranks* ranks)
    : model_(std::move(model)), run_(std::move(run)), device_(device), budget_(budget),
      alone_(ranks ? nullptr : rank_alone(run_.parallel)), ranks_(ranks ? ranks : alone_.get()),
      workload_(std::make_unique<plan::Workload>(model_, run_, laid_out_for ? *laid_out_for : device.provider())) {
  const bool attends = std::find(model_.mixers.begin(), model_.mixers.end(), config::LayerKind::Attention) != model_.mixers.end();
  if (attends && run_.parallel.tp > 1 && model_.attention.whole_vector_qk_norm)
    throw Error(ErrorCode::Config, fmt::format("tensor_model_parallel_size: {} ranks hold the heads under one norm (qk_layernorm_whole_vector), which is not executed",
                                               run_.parallel.tp),
                "gdnplan prices it; here such a model runs with tp 1");
  connect_groups(*ranks_, model_, Parameters::copies_embedding(model_, run_));
  const Bytes state = Parameters::bytes_of(model::static_state(model_, run_, ranks_->place().pp)).total();
  if (const Bytes may_take = this->may_take(); state > may_take)
    throw Error(ErrorCode::DoesNotFit,
                fmt::format("parameters, gradients and optimizer take {}, {} may be used", format_bytes(state), format_bytes(may_take)),
                "no recompute setting changes that: a smaller model, or more memory");
  parameters_ = std::make_unique<Parameters>(model_, run_, device, ledger_, *ranks_);
}

Bytes Session::may_take() const {
  const Bytes free = device_.memory_now().free; // 0: unknown
  return free == 0 ? budget_ : std::min(budget_, free + (parameters_ ? parameters_->bytes().total() : 0));
}

void Session::use(const plan::Setting& setting, std::optional<Checks> chosen) {
  const Checks checks = chosen.value_or(Checks{.poison = !device_.asynchronous()});
  executor_.reset(); // the arena first: two never coexist
  const std::int64_t stage = ranks_->place().pp;
  const int micro_batches = static_cast<int>(run_.micro_batches());
  program_ = std::make_unique<program::Program>(step_program(*workload_, setting, micro_batches, stage));
  program::LayoutOptions options;
  options.guard = kGuard;
  const program::Layout layout = program::lay_out(*program_, options);
  Communicator& pipeline = ranks_->group(model::Group::Pp);
  for (const program::Route& r : program::routes(program::transfers(*program_, static_cast<int>(run_.parallel.pp), static_cast<int>(stage),
                                                                    static_cast<int>(run_.parallel.vp), micro_batches))) {
    if (r.sends) pipeline.connect_send(r.peer, r.tag, r.largest);
    else pipeline.connect_receive(r.peer, r.tag);
  }
  if (const Bytes may_take = this->may_take(); parameters_->bytes().total() + layout.extent > may_take)
    throw Error(ErrorCode::DoesNotFit, does_not_fit(*workload_, setting, predict(*workload_, setting, *program_, stage), may_take, stage));
  executor_ = std::make_unique<Executor>(*program_, script(*program_, layout, run_.parallel, stage, micro_batches), device_,
                                         *parameters_, ledger_, checks, &workload_->provider() != &device_.provider());
}

namespace {

// Totals of the whole step from those of each rank. TP ranks see the same losses; auxiliary losses are
// sums over the tokens a rank holds; expert loads were counted by one rank of each group.
void sum_over_ranks(StepTotals& totals, std::int64_t experts, const Ranks& ranks) {
  totals.expert_load.resize(static_cast<size_t>(experts));
  const double mine = ranks.place().tp == 0 ? 1 : 0;
  std::vector<double> values{totals.loss_sum * mine, totals.mtp_sum * mine, totals.aux_loss};
  for (std::int64_t load : totals.expert_load) values.push_back(static_cast<double>(load));
  ranks.world().sum_on_host(values);
  totals.loss_sum = values[0];
  totals.mtp_sum = values[1];
  totals.aux_loss = values[2];
  for (size_t e = 0; e < totals.expert_load.size(); ++e) totals.expert_load[e] = static_cast<std::int64_t>(values[3 + e]);
}

} // namespace

StepResult Session::run(const std::vector<Batch>& batches, std::uint64_t step, std::uint64_t seed,
                        const Observer& observer) {
  const std::int64_t tokens = run_.micro_batch * run_.seq, data_ranks = run_.parallel.dp(), cp = run_.parallel.cp;
  if (static_cast<std::int64_t>(batches.size()) != run_.micro_batches())
    throw Error(ErrorCode::Internal, fmt::format("{} batches for {} micro-batches", batches.size(), run_.micro_batches()));
  StepTotals totals;
  std::vector<MicroBatch> views;
  std::vector<TokenShards> shards;
  shards.reserve(batches.size());
  double labels = 0;
  for (const Batch& b : batches) {
    check_batch(b, tokens, model_.vocab);
    check_sequences(b, run_, static_cast<std::int64_t>(views.size()));
    if (cp > 1) shards.push_back(token_shards(b.sequences, run_.micro_batch, run_.seq, cp, ranks_->place().cp));
    views.push_back({b.ids, b.labels, b.sequences, static_cast<std::int64_t>(views.size()), cp > 1 ? &shards.back() : nullptr});
    for (std::int64_t label : b.labels) labels += label != -100;
  }
  ranks_->group(model::Group::Dp).sum_on_host({&labels, 1});
  const auto valid = static_cast<std::int64_t>(labels);
  if (valid == 0) throw Error(ErrorCode::Config, "batch: every label is ignored");
  StepContext context{seed, step, views, 1.0 / static_cast<double>(valid), 1.0 / static_cast<double>(run_.micro_batches() * data_ranks),
                      &totals, ranks_->alone() ? nullptr : ranks_};

  parameters_->zero_gradients();
  ledger_.reset_peak();
  device_.synchronise(); // gradients are zero, and no time of the step
  const auto start = std::chrono::steady_clock::now();
  executor_->run(context, observer);
  parameters_->reduce_gradients();
  device_.synchronise();
  StepResult r;
  r.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (!ranks_->alone()) sum_over_ranks(totals, has_experts(model_) ? model_.moe.experts : 0, *ranks_);
  r.loss = totals.loss_sum / static_cast<double>(valid);
  r.mtp_loss = totals.mtp_sum / static_cast<double>(valid);
  r.aux_loss = totals.aux_loss;
  r.tokens = tokens * static_cast<std::int64_t>(batches.size()) * data_ranks;
  r.valid = valid;
  r.expert_load = std::move(totals.expert_load);
  r.peak = ledger_.peak();
  return r;
}

Trace run_traced(Session& session, const Batch& batch) {
  Trace out;
  auto copy = [&](const OpCall& call, model::TensorId t) {
    for (const OpCall::Operand& o : call.operands()) {
      if (o.access.tensor != t || o.access.gradient) continue;
      const View v = call.view_of(o);
      std::vector<float> values(static_cast<size_t>(v.rows * v.cols));
      if (v.dtype == DType::FP32) {
        session.device().to_host(values.data(), v.data, v.rows * v.cols * 4);
      } else {
        std::vector<std::uint16_t> raw(values.size());
        session.device().to_host(raw.data(), v.data, v.rows * v.cols * 2);
        for (size_t i = 0; i < raw.size(); ++i) {
          const std::uint32_t bits = static_cast<std::uint32_t>(raw[i]) << 16; // bf16 is the upper half of an fp32
          std::memcpy(&values[i], &bits, 4);
        }
      }
      return values;
    }
    return std::vector<float>();
  };
  Observer observer;
  observer.ran = [&](size_t, const OpCall& call, Seconds) {
    if (call.pass() != program::Pass::Forward) return;
    for (model::TensorId t : call.op().outputs) {
      if (t == call.list().output) out.hidden.push_back(copy(call, t));
      if (call.op().name == "final_norm" && t == call.op().outputs.front()) out.normed = copy(call, t);
      if (call.op().kind == model::OpKind::LmHead && call.op().name == "lm_head") out.logits = copy(call, t);
    }
  };
  out.result = session.run({batch}, 0, 0, observer);
  return out;
}

} // namespace gdn::trainer
