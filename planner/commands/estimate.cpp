#include <optional>

#include <fmt/core.h>

#include "core/error.h"
#include "model/validate.h"
#include "planner/commands/commands.h"
#include "planner/layouts.h"
#include "planner/page.h"
#include "planner/results.h"
#include "program/allocator.h"

namespace gdn::planner {

namespace {

struct EstimateCommand {
  ModelOptions model;
  OutputOptions output;
  std::string solve;
  bool ranks = false;

  struct Simulated {
    std::optional<plan::ReservedBand> reserved; // unset: too many ops to replay, or stack native
    std::vector<plan::ReplayCost> replays;
  };

  int run() {
    const Case c = load(model);
    if (!solve.empty()) return run_solve(c, solve, plan::Freedom::Setting, output);
    require_legal(c, plan::Setting::of(c.profile.run));
    plan::Estimator estimator(c.profile.model, c.profile.run, c.hardware, c.budget);
    const plan::Setting setting = plan::Setting::of(c.profile.run);
    const plan::Estimate e = estimator.evaluate(setting);
    const std::vector<plan::LayerEstimate> layers = estimator.layers(setting);
    std::vector<plan::Notice> notices = plan::setting_notices(estimator.workload(), setting);
    for (plan::Notice& n : plan::unmodelled_notices(c.profile.model, c.profile.run)) notices.push_back(std::move(n));
    if (c.profile.run.stack == "megatron")
      if (auto notice = plan::fragmentation_notice(e)) notices.push_back(*notice);
    const std::vector<cost::Assumption> assumptions = estimator.assumptions();
    Output out;
    const Simulated simulated{estimator.reserved(e, 16000), estimator.replay_costs(setting)};
    out.text = text(c, e, simulated, layers, notices, assumptions);
    out.json = [&] { return json(c, e, simulated, layers, notices, assumptions); };
    out.csv = [&] { return csv(e); };
    out.yaml = [&] { return config::to_yaml(make_profile(c, {e}, &estimator)); };
    out.svg = [&] { return memory_figure(c, estimator, e); };
    out.html = [&] {
      plan::PlanOptions options;
      options.budget = c.budget;
      return make_page(c, estimator, e, plan::make_plan(c.profile.model, c.profile.run, c.hardware, options), out.text);
    };
    write(out, output);
    return e.fits ? 0 : 3;
  }

  report::Document text(const Case& c, const plan::Estimate& e, const Simulated& simulated, const std::vector<plan::LayerEstimate>& layers,
                        const std::vector<plan::Notice>& notices, const std::vector<cost::Assumption>& assumptions) const {
    report::Document d;
    add_run(d, c);
    d.pairs({{"recompute", e.setting.text()}});
    const plan::RankEstimate& w = e.worst_rank();
    d.heading(e.ranks.size() > 1 ? fmt::format("Memory of rank {}, the fullest", w.rank) : "Memory");
    report::Table t{"memory", {{"category"}, {"GiB", report::Align::Right}, {"share", report::Align::Right}}};
    for (int i = 0; i < kCategoryCount; ++i) {
      const Category k = static_cast<Category>(i);
      if (e.categories[k] == 0) continue;
      t.rows.push_back({std::string(name_of(k)), fmt::format("{:.2f}", static_cast<double>(e.categories[k]) / kGiB),
                        fmt::format("{:.1f} %", 100.0 * static_cast<double>(e.categories[k]) / static_cast<double>(e.total_bytes))});
    }
    t.rows.push_back({"total", fmt::format("{:.2f}", static_cast<double>(e.total_bytes) / kGiB), ""});
    d.table(std::move(t));
    const char* verdict = !e.fits ? "does not fit" : e.tight ? "fits, tightly" : "fits";
    d.line(fmt::format("allocated peak {}, with context and allocator {} of {}: {}", format_gib(e.peak_bytes), format_gib(e.total_bytes),
                       format_gib(e.budget_bytes), verdict),
           !e.fits ? report::Tone::Bad : e.tight ? report::Tone::Warn : report::Tone::Good, 2);
    if (simulated.reserved)
      d.line(fmt::format("PyTorch's allocator, simulated: reserves {} to {}{}", format_gib(simulated.reserved->low), format_gib(simulated.reserved->high),
                         c.profile.run.settings.expandable_segments ? " with expandable segments" : ""),
             report::Tone::Plain, 2);
    else if (c.profile.run.stack == "megatron" && e.peak_bytes > program::kLargestDevice)
      d.line("PyTorch's allocator: not simulated, the tensors need more than 512 GiB", report::Tone::Plain, 2);
    d.line(fmt::format("peak in {}: {}", w.peak_phase, w.peak_event), report::Tone::Plain, 2);
    std::string largest;
    for (const auto& [name, bytes] : w.largest) largest += fmt::format("{}{} {}", largest.empty() ? "" : ", ", name, format_bytes(bytes));
    d.line("largest there: " + largest, report::Tone::Plain, 2);
    phases(d, w);
    add_outside(d, e);
    if (ranks) add_ranks(d, e);
    d.heading("Layers, one micro-batch");
    report::Table lt{"layers", {{"kind"}, {"count", report::Align::Right}, {"retained", report::Align::Right}, {"B/token", report::Align::Right},
                                {"forward", report::Align::Right}, {"backward", report::Align::Right}, {"replay", report::Align::Right}}};
    const double tokens = static_cast<double>(c.profile.run.seq * c.profile.run.micro_batch) /
                          static_cast<double>(c.profile.run.parallel.cp);
    std::vector<std::pair<const plan::LayerEstimate*, int>> kinds;
    for (const auto& l : layers) {
      auto it = std::find_if(kinds.begin(), kinds.end(), [&](auto& k) { return k.first->kind == l.kind && k.first->retained == l.retained; });
      if (it == kinds.end()) kinds.push_back({&l, 1});
      else ++it->second;
    }
    for (const auto& [l, count] : kinds)
      lt.rows.push_back({l->kind, fmt::format("{}", count), format_bytes(l->retained),
                         format_count(static_cast<std::int64_t>(static_cast<double>(l->retained) / tokens)), format_seconds(l->forward),
                         format_seconds(l->backward), l->replay > 0 ? format_seconds(l->replay) : "-"});
    d.table(std::move(lt));
    d.heading("Throughput");
    d.pairs({{"step", fmt::format("{} ({} micro-batch{}, bubble {:.1f} %)", format_seconds(e.step_seconds), c.profile.run.micro_batches(), c.profile.run.micro_batches() == 1 ? "" : "es", e.bubble * 100)},
             {"tokens/s", fmt::format("{} ({} a GPU)", format_count(static_cast<std::int64_t>(e.tokens_per_second)),
                                      format_count(static_cast<std::int64_t>(e.tokens_per_second_per_gpu)))},
             {"model FLOPs", fmt::format("{:.0f} TFLOP/s a GPU, MFU {:.1f} %, HFU {:.1f} %", e.model_tflops_per_gpu, e.mfu * 100, e.hfu * 100)},
             {"recompute", fmt::format("{} a step ({:.1f} %)", format_seconds(e.recompute_seconds), 100 * e.recompute_seconds / e.step_seconds)},
             {"reduction, update", fmt::format("{}, {}", format_seconds(e.reduce_seconds), format_seconds(e.optimizer_seconds))}});
    d.pairs({{"band", fmt::format("{} to {} a step", format_seconds(e.step_low), format_seconds(e.step_high))}});
    if (w.offloaded > 0)
      d.pairs({{"offload", fmt::format("{} a micro-batch each way: {} on the host link beside {} of forward", format_bytes(w.offloaded),
                                       format_seconds(w.offload_seconds), format_seconds(w.forward))}});
    if (w.host_bytes > 0) d.pairs({{"host memory", fmt::format("{} a rank", format_gib(w.host_bytes))}});
    add_replays(d, e, simulated.replays);
    add_notices(d, notices);
    add_assumptions(d, assumptions);
    return d;
  }

  // One row a pipeline rank, in bytes.
  static report::Document csv(const plan::Estimate& e) {
    report::Document d;
    report::Table t{"estimate", {{"rank"}, {"layers"}, {"state_bytes"}, {"retained_bytes_per_micro_batch"}, {"in_flight"}, {"peak_bytes"}, {"phase"}, {"event"}}};
    for (int i = 0; i < kCategoryCount; ++i) t.columns.push_back({std::string(name_of(static_cast<Category>(i)))});
    for (const plan::RankEstimate& r : e.ranks) {
      t.rows.push_back({fmt::format("{}", r.rank), fmt::format("{}", r.layers), fmt::format("{}", r.state.total()),
                        fmt::format("{}", r.retained_per_micro_batch), fmt::format("{}", r.in_flight), fmt::format("{}", r.peak.bytes), r.peak_phase, r.peak_event});
      for (int i = 0; i < kCategoryCount; ++i) t.rows.back().push_back(fmt::format("{}", r.peak.by[static_cast<Category>(i)]));
    }
    d.table(std::move(t));
    return d;
  }

  static void phases(report::Document& d, const plan::RankEstimate& w) {
    report::Table t{"phases", {{"phase"}, {"peak", report::Align::Right}}};
    for (const auto& [name, bytes] : {std::pair{"forward", w.forward_peak}, {"loss", w.loss_peak}, {"backward", w.backward_peak},
                                      {"replay", w.replay_peak}, {"gradient reduction, update", w.optimizer_peak}, {"first step, before Adam's moments", w.first_step_peak}})
      if (bytes > 0) t.rows.push_back({name, format_gib(bytes)});
    d.table(std::move(t));
  }

  static void add_outside(report::Document& d, const plan::Estimate& e) {
    d.heading("Outside the tensors (context)");
    report::Table t{"outside", {{"item", report::Align::Left, true}, {"bytes", report::Align::Right}, {"source", report::Align::Left, true}}};
    std::string above; // a source is written once
    for (const plan::OutsideRow& row : e.outside) {
      t.rows.push_back({row.name, format_bytes(row.bytes), {row.source == above ? "\"" : row.source, report::Tone::Dim}});
      above = row.source;
    }
    d.table(std::move(t));
  }

  static void add_replays(report::Document& d, const plan::Estimate& e, const std::vector<plan::ReplayCost>& replays) {
    if (replays.empty()) return;
    d.heading("Recompute, a step of the rank that replays most");
    report::Table t{"replays", {{"module"}, {"layers"}, {"time", report::Align::Right}, {"of the step", report::Align::Right}}};
    for (const plan::ReplayCost& r : replays)
      t.rows.push_back({r.module, r.layer_kind, format_seconds(r.seconds), fmt::format("{:.2f} %", 100 * r.seconds / e.step_seconds)});
    d.table(std::move(t));
  }

  static void add_ranks(report::Document& d, const plan::Estimate& e) {
    d.heading("Pipeline ranks");
    report::Table t{"ranks", {{"rank", report::Align::Right}, {"layers", report::Align::Right}, {"state", report::Align::Right},
                              {"a micro-batch", report::Align::Right}, {"in flight", report::Align::Right}, {"peak", report::Align::Right},
                              {"phase"}, {"set by", report::Align::Left, true}}};
    for (const plan::RankEstimate& r : e.ranks)
      t.rows.push_back({fmt::format("{}", r.rank), fmt::format("{}", r.layers), format_gib(r.state.total()),
                        format_gib(r.retained_per_micro_batch), fmt::format("{}", r.in_flight),
                        {format_gib(r.peak.bytes), r.rank == e.worst ? report::Tone::Strong : report::Tone::Plain}, r.peak_phase, r.peak_event});
    d.table(std::move(t));
  }

  static Json json(const Case& c, const plan::Estimate& e, const Simulated& simulated, const std::vector<plan::LayerEstimate>& layers,
                   const std::vector<plan::Notice>& notices, const std::vector<cost::Assumption>& assumptions) {
    Json j = json_head("gdnplan.estimate/1", c, e.setting.text());
    const plan::RankEstimate& w = e.worst_rank();
    j["fits"] = e.fits;
    j["tight"] = e.tight;
    Json outside = Json::array();
    for (const plan::OutsideRow& row : e.outside) outside.push_back({{"name", row.name}, {"bytes", row.bytes}, {"source", row.source}});
    j["memory"] = {{"peak_bytes", e.peak_bytes}, {"total_bytes", e.total_bytes}, {"peak_phase", w.peak_phase}, {"peak_event", w.peak_event},
                   {"budget_bytes", e.budget_bytes}, {"categories", json_categories(e.categories)}, {"outside", std::move(outside)},
                   {"phases", {{"forward", w.forward_peak}, {"loss", w.loss_peak}, {"backward", w.backward_peak}, {"replay", w.replay_peak},
                               {"optimizer", w.optimizer_peak}}}};
    if (simulated.reserved) {
      j["memory"]["reserved_low_bytes"] = simulated.reserved->low;
      j["memory"]["reserved_high_bytes"] = simulated.reserved->high;
    }
    Json library = Json::array();
    for (const model::LibraryBuffer& b : w.library) library.push_back({{"name", b.name}, {"bytes", b.bytes}, {"source", b.source}});
    j["memory"]["library"] = std::move(library);
    j["memory"]["first_step_peak_bytes"] = w.first_step_peak;
    j["memory"]["host_bytes"] = w.host_bytes;
    j["memory"]["offloaded_bytes_per_micro_batch"] = w.offloaded;
    Json largest = Json::array();
    for (const auto& [name, bytes] : w.largest) largest.push_back({{"tensor", name}, {"bytes", bytes}});
    j["memory"]["largest_at_peak"] = std::move(largest);
    Json list = Json::array();
    for (const auto& l : layers)
      list.push_back({{"index", l.index}, {"kind", l.kind}, {"retained_bytes", l.retained}, {"input_bytes", l.input},
                      {"forward_seconds", l.forward}, {"backward_seconds", l.backward}, {"replay_seconds", l.replay}});
    j["layers"] = std::move(list);
    Json per_rank = Json::array();
    for (const plan::RankEstimate& r : e.ranks)
      per_rank.push_back({{"rank", r.rank}, {"layers", r.layers}, {"state_bytes", r.state.total()}, {"peak_bytes", r.peak.bytes},
                          {"peak_phase", r.peak_phase}, {"peak_event", r.peak_event}, {"in_flight", r.in_flight},
                          {"retained_bytes_per_micro_batch", r.retained_per_micro_batch}});
    j["ranks"] = std::move(per_rank);
    j["throughput"] = json_throughput(e);
    j["throughput"]["step_low_seconds"] = e.step_low;
    j["throughput"]["step_high_seconds"] = e.step_high;
    Json replays = Json::array();
    for (const plan::ReplayCost& r : simulated.replays)
      replays.push_back({{"module", r.module}, {"layer_kind", r.layer_kind}, {"seconds", r.seconds}});
    j["replays"] = std::move(replays);
    j["assumptions"] = json_assumptions(assumptions);
    j["notices"] = json_notices(notices);
    return j;
  }
};

} // namespace

cli::Runner add_estimate(cli::Command& program) {
  auto command = std::make_shared<EstimateCommand>();
  cli::Command app = program.subcommand("estimate", "one configuration: memory by category, phase, rank and layer; throughput");
  command->model.add_to(app);
  command->output.add_to(app, {"text", "json", "csv", "yaml", "html", "svg"});
  app.option("--solve", command->solve, kSolveHelp);
  app.flag("--ranks", command->ranks, "one row a pipeline rank");
  app.footer("Example: gdnplan estimate qwen3-next-80b-a3b --modules gdn_qkv,moe --ranks\nExit: 0 fits, 3 does not fit");
  return [command] { return command->run(); };
}

} // namespace gdn::planner
