#include <fmt/format.h>

#include "config/run_io.h"
#include "plan/layer_view.h"
#include "planner/commands/commands.h"
#include "planner/results.h"

namespace gdn::planner {

namespace {

struct LayerCommand {
  ModelOptions model;
  OutputOptions output;
  std::string layer = "gdn", diff;
  bool has_diff = false;

  int run() {
    const Case c = load(model);
    const plan::Setting setting = plan::Setting::of(c.profile.run);
    const plan::LayerView v = view(c, setting);
    std::optional<plan::LayerView> other;
    plan::Setting other_setting;
    if (has_diff) {
      config::Run run = c.profile.run;
      run.recompute.method.clear(); // full granularity's
      run.recompute.num_layers.reset();
      for (const config::Setting& s : config::modules_settings(diff, "--diff")) config::apply(run, s.key, s.value, s.where);
      other_setting = plan::Setting::of(run);
      other = view(c, other_setting);
    }
    Output out;
    out.text = text(c, setting, v, other ? &*other : nullptr, other_setting);
    out.json = [&] {
      Json j = json(c, setting, v);
      if (other) j["diff"] = json(c, other_setting, *other);
      return j;
    };
    out.yaml = [&] {
      config::Profile p = profile_identity(c);
      p.identity.push_back({"layer", v.name});
      p.sets.push_back(rows(setting, v));
      if (other) p.sets.push_back(rows(other_setting, *other));
      return config::to_yaml(p);
    };
    write(out, output);
    return 0;
  }

  plan::LayerView view(const Case& c, const plan::Setting& s) const {
    require_legal(c, s);
    return plan::view_layer(c.profile.model, c.profile.run, c.hardware, layer, s);
  }

  // Row names as measurements of one module have them.
  static config::ProfileSet rows(const plan::Setting& s, const plan::LayerView& v) {
    config::ProfileSet set{s.text(), {}};
    auto row = [&](const char* key, double value, const char* unit) { set.rows.push_back({key, value, unit, "predicted"}); };
    row("layer.retained_bytes_beyond_input", static_cast<double>(v.retained - v.input), "bytes");
    row("layer.forward_peak_bytes", static_cast<double>(v.forward_peak), "bytes");
    row("layer.backward_peak_bytes", static_cast<double>(v.backward_peak), "bytes");
    row("time.forward_seconds", v.time.forward, "seconds");
    row("time.forward_backward_seconds", v.time.forward + v.time.backward + v.time.replay, "seconds");
    return set;
  }

  static std::string per_token(Bytes bytes, std::int64_t tokens) {
    return bytes % tokens == 0 ? format_count(bytes / tokens)
                               : fmt::format("{:.1f}", static_cast<double>(bytes) / static_cast<double>(tokens));
  }

  report::Document text(const Case& c, const plan::Setting& setting, const plan::LayerView& v, const plan::LayerView* other,
                        const plan::Setting& other_setting) const {
    report::Document d;
    add_run(d, c);
    d.heading(fmt::format("{} with {}{}, {} tokens a rank", v.name, setting.text(), other ? " | " + other_setting.text() : "", format_count(v.tokens)));
    report::Table t{"tensors", {{"tensor", report::Align::Left, true}, {"made by", report::Align::Left, true}, {"shape", report::Align::Left, true}, {"dtype"}, {"MiB", report::Align::Right}, {"B/token", report::Align::Right},
                                {other ? setting.text() : "state", report::Align::Left, true}}};
    if (other) t.columns.push_back({other_setting.text(), report::Align::Left, true});
    auto cell = [](const plan::TensorView& x) -> report::Cell {
      const report::Tone tone = x.state == "kept" || x.state == "input, kept" ? report::Tone::Strong
                                : x.state == "replayed"                       ? report::Tone::Good
                                                                              : report::Tone::Dim;
      return {x.state == "replayed" && !x.span.empty() ? fmt::format("replayed ({})", x.span) : x.state, tone};
    };
    for (size_t i = 0; i < v.tensors.size(); ++i) {
      const plan::TensorView& x = v.tensors[i];
      t.rows.push_back({x.name, x.made_by, fmt::format("{}", fmt::join(x.shape, " x ")), std::string(name_of(x.dtype)),
                        fmt::format("{:.1f}", static_cast<double>(x.bytes) / kMiB), per_token(x.bytes, v.tokens), cell(x)});
      if (other) t.rows.back().push_back(cell(other->tensors[i]));
    }
    d.table(std::move(t));
    auto both = [&](auto get) { return other ? get(v) + "  |  " + get(*other) : get(v); };
    d.heading("Totals");
    d.pairs({{"retained", both([&](const plan::LayerView& x) { return fmt::format("{} ({} B/token, {} of it beyond the input)", format_bytes(x.retained), per_token(x.retained, x.tokens), per_token(x.retained - x.input, x.tokens)); })},
             {"forward peak", both([&](const plan::LayerView& x) { return fmt::format("{:.1f} MiB at {}", static_cast<double>(x.forward_peak) / kMiB, x.forward_event); })},
             {"backward peak", both([&](const plan::LayerView& x) { return fmt::format("{:.1f} MiB at {}", static_cast<double>(x.backward_peak) / kMiB, x.backward_event); })},
             {"time", both([&](const plan::LayerView& x) { return fmt::format("forward {}, backward {}, replay {}", format_seconds(x.time.forward), format_seconds(x.time.backward), format_seconds(x.time.replay)); })}});
    return d;
  }

  Json json(const Case& c, const plan::Setting& setting, const plan::LayerView& v) const {
    Json j = json_head("gdnplan.layer/1", c, setting.text());
    j["layer"] = v.name;
    j["tokens"] = v.tokens;
    j["retained_bytes"] = v.retained;
    j["retained_bytes_per_token"] = static_cast<double>(v.retained) / static_cast<double>(v.tokens);
    j["input_bytes"] = v.input;
    j["output_bytes"] = v.output;
    j["forward_peak_bytes"] = v.forward_peak;
    j["backward_peak_bytes"] = v.backward_peak;
    j["replay_peak_bytes"] = v.replay_peak;
    j["forward_seconds"] = v.time.forward;
    j["backward_seconds"] = v.time.backward;
    j["replay_seconds"] = v.time.replay;
    Json tensors = Json::array();
    for (const plan::TensorView& t : v.tensors)
      tensors.push_back({{"name", t.name}, {"op", t.made_by}, {"shape", t.shape}, {"dtype", std::string(name_of(t.dtype))},
                         {"bytes", t.bytes}, {"storage", t.storage}, {"state", t.state}, {"span", t.span}});
    j["tensors"] = std::move(tensors);
    j["assumptions"] = json_assumptions(v.assumptions);
    j["notices"] = json_notices(plan::unmodelled_notices(c.profile.model, c.profile.run));
    return j;
  }
};

} // namespace

cli::Runner add_layer(cli::Command& program) {
  auto command = std::make_shared<LayerCommand>();
  cli::Command app = program.subcommand("layer", "one layer's tensors: bytes, and what is kept, freed or replayed");
  command->model.add_to(app);
  command->output.add_to(app, {"text", "json", "csv", "yaml"});
  app.option("--layer", command->layer, "gdn, gdn2, attention, moe or mlp (the module alone), or the index of a decoder layer");
  const cli::Option diff = app.option("--diff", command->diff, "a second module list, shown beside the first");
  app.footer("Example: gdnplan layer qwen3.5-35b-a3b --layer gdn --build local --diff gdn_qkv");
  return [command, diff] {
    command->has_diff = diff.given();
    return command->run();
  };
}

} // namespace gdn::planner
