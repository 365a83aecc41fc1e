#include <cmath>
#include <memory>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "reference/random.h"
#include "trainer/commands/commands.h"
#include "trainer/data.h"
#include "trainer/decode/check.h"
#include "trainer/devices.h"
#include "trainer/executed.h"
#include "trainer/hf/fingerprint.h"
#include "trainer/hf/parity.h"
#include "trainer/hf/weights.h"
#include "trainer/op_check.h"
#include "trainer/options.h"

namespace gdn::trainer {

namespace {

struct CheckOptions {
  std::string model, folder, export_hf, device = "auto", dtype, stack = "both", format = "text";
  std::vector<config::Setting> settings;
  bool decode = false;

  // What is checked: the checkpoint's model, the one given, or our own: one with each form of the delta rule.
  std::vector<config::ModelProfile> profiles() const {
    const config::Profiles known;
    if (!folder.empty() || !model.empty()) return {known.model(folder.empty() ? model : folder, settings)};
    std::vector<config::Setting> gdn2 = settings;
    gdn2.insert(gdn2.begin(), {{"linear_attention_type", "gdn2"}, {"name", "tiny, gdn2"}});
    return {known.model("tiny", settings), known.model("tiny", gdn2)};
  }
  std::vector<std::string> stacks() const { return stack == "both" ? std::vector<std::string>{"native", "megatron"} : std::vector{stack}; }
  // The run of one stack and dtype, with nothing in it that is not executed.
  config::Run run_of(const config::ModelProfile& profile, const std::string& a_stack, DType a_dtype) const {
    config::Run run = profile.run;
    run.stack = a_stack;
    run.dtype = a_dtype;
    run.vision = config::VisionMode::Absent;
    require_executed(profile.model, run, {nullptr, &settings});
    return run;
  }
};

// ------------------------------------------------------------------------------------ every op ----

// Weights drawn as for training; norms and biases, which start at constants, a little off them.
void draw_weights(Parameters& parameters, std::uint64_t seed) {
  parameters.initialise(seed);
  for (const ParameterSlot& slot : parameters.slots()) {
    if (slot.parameter->shape.size() > 1) continue;
    std::vector<float> w = parameters.weights(slot.name());
    const reference::RandomStream random{.seed = seed, .op = reference::stream_id(slot.name().data(), slot.name().size())};
    for (size_t i = 0; i < w.size(); ++i) w[i] += 0.1f * static_cast<float>(random.normal(i));
    parameters.set_weights(slot.name(), w);
  }
}

struct OpsOutcome {
  std::string model, stack, dtype;
  std::vector<OpError> ops;
};

std::vector<OpsOutcome> run_ops(const CheckOptions& o, Device& device) {
  std::vector<OpsOutcome> outcomes;
  for (const config::ModelProfile& profile : o.profiles())
    for (const std::string& stack : o.stacks())
      for (const std::string& dtype : o.dtype.empty() ? std::vector<std::string>{"bf16", "fp32"} : std::vector{o.dtype}) {
        if (o.dtype.empty() && !device.takes(parse_dtype(dtype))) continue;
        const config::Run run = o.run_of(profile, stack, parse_dtype(dtype));
        OpCheck checked(device);
        Session session(profile.model, run, checked);
        constexpr std::uint64_t kSeed = 1;
        draw_weights(session.parameters(), kSeed);
        session.use(plan::Setting::of(run));
        const auto tokens = open_tokens({.seed = kSeed}, ".", profile.model.vocab, run);
        session.run(step_batches(*tokens, run, 0), 0, kSeed);
        outcomes.push_back({profile.model.name, stack, dtype, checked.results()});
      }
  return outcomes;
}

int check_ops(const CheckOptions& o) {
  std::unique_ptr<Device> device = make_device(o.device);
  const std::vector<OpsOutcome> outcomes = run_ops(o, *device);
  if (o.format == "json") {
    nlohmann::ordered_json root{{"schema", "gdn.check/1"}, {"device", device->name()}};
    for (const OpsOutcome& outcome : outcomes) {
      nlohmann::ordered_json ops = nlohmann::ordered_json::array();
      for (const OpError& e : outcome.ops)
        ops.push_back({{"kind", model::name_of(e.kind)}, {"op", e.op}, {"worst", e.tensor}, {"off", e.error}, {"cpu", e.reference}, {"allowed", e.allowed},
                       {"runs", e.runs}, {"ok", e.ok()}});
      root["results"].push_back({{"model", outcome.model}, {"stack", outcome.stack}, {"dtype", outcome.dtype}, {"ops", ops}});
    }
    fmt::print("{}\n", root.dump(2));
  } else {
    report::Document d;
    for (const OpsOutcome& outcome : outcomes) {
      d.heading(fmt::format("{}: every op, stack {}, {}, on {}", outcome.model, outcome.stack, outcome.dtype, device->name()));
      add_to(d, outcome.ops);
    }
    d.line("off by: L2 of the difference to the same op in double on the same operands, over the L2 of that; CPU: the same of the CPU's functions.");
    print(d);
  }
  size_t ops = 0;
  for (const OpsOutcome& outcome : outcomes)
    for (const OpError& e : outcome.ops) {
      ++ops;
      if (!e.ok())
        throw Error(ErrorCode::Numeric, fmt::format("{}, stack {}, {}: {}: {} is off by {:.1e}, allowed {:.1e}", outcome.model, outcome.stack, outcome.dtype,
                                                    e.op, e.tensor, e.error, e.allowed));
    }
  say(fmt::format("{} ops and backward steps agree with the same in double", ops));
  return 0;
}

// ------------------------------------------------------------------------------ a checkpoint ----

struct Outcome {
  std::string stack;
  hf::ParityReport report;
};

nlohmann::ordered_json to_json(const CheckOptions& o, const std::string& device, const std::string& dtype, const std::vector<Outcome>& outcomes) {
  nlohmann::ordered_json root{{"schema", "gdn.check/1"}, {"checkpoint", o.folder}, {"device", device}, {"dtype", dtype}};
  for (const Outcome& outcome : outcomes) {
    nlohmann::ordered_json tensors = nlohmann::ordered_json::array();
    for (const hf::Difference& d : outcome.report.rows) {
      nlohmann::ordered_json row{{"name", d.name}, {"measure", d.by_norm ? "L2" : "largest"}, {"off", d.measured()}, {"allowed", d.allowed},
                                 {"ok", d.ok()}, {"worst", d.coordinate()}, {"found", d.found}, {"expected", d.expected}};
      if (d.exact) row["exact"] = {{"off", d.exact->ours}, {"reference_off", d.exact->reference}, {"reference_rounding", d.exact->rounding}};
      tensors.push_back(std::move(row));
    }
    root["results"].push_back({{"stack", outcome.stack}, {"ok", outcome.report.first_mismatch() == nullptr}, {"tensors", tensors}});
  }
  return root;
}

// Without reference results: what it computes, to be compared with another run of it.
void show_fingerprints(const CheckOptions& o, const config::ModelProfile& profile, DType dtype, Device& device) {
  constexpr std::int64_t kSeq = 64;
  constexpr std::uint64_t kSeed = 1;
  report::Document d;
  nlohmann::ordered_json root{{"schema", "gdn.check/1"}, {"checkpoint", o.folder}, {"device", device.name()}, {"dtype", name_of(dtype)}};
  for (const std::string& stack : o.stacks()) {
    const config::Model model = hf::parity_model(profile.model);
    const config::Run run = hf::parity_run(o.run_of(profile, stack, dtype), 1, kSeq);
    Session session(model, run, device);
    hf::load(hf::Checkpoint(o.folder, model, session.parameters().table()), session.parameters());
    session.use(plan::Setting::of(run));
    const Trace trace = run_traced(session, hf::drawn_tokens(kSeq, model.vocab, kSeed));
    d.heading(fmt::format("{}: stack {}, {}, on {}", o.folder, stack, name_of(dtype), device.name()));
    report::Table t{"fingerprint", {{"tensor"}, {"mean square", report::Align::Right}, {"hash", report::Align::Right}}};
    nlohmann::ordered_json tensors = nlohmann::ordered_json::array();
    for (const hf::Fingerprint& f : hf::fingerprints(trace)) {
      t.rows.push_back({f.name, fmt::format("{:.6g}", f.mean_square), fmt::format("{:016x}", f.hash)});
      tensors.push_back({{"name", f.name}, {"mean_square", f.mean_square}, {"hash", fmt::format("{:016x}", f.hash)}});
    }
    d.table(std::move(t));
    d.pairs({{"loss", fmt::format("{:.6f} on {} tokens drawn from seed {}", trace.result.loss, kSeq, kSeed)}});
    root["results"].push_back({{"stack", stack}, {"loss", trace.result.loss}, {"fingerprints", tensors}});
    if (!std::isfinite(trace.result.loss)) throw Error(ErrorCode::Numeric, fmt::format("stack {}: the loss is {}", stack, trace.result.loss));
  }
  d.line(fmt::format("{} is not there, so nothing was compared.", hf::kReferenceFile));
  if (o.format == "json") fmt::print("{}\n", root.dump(2));
  else print(d);
}

// Writes the weights back and holds the files against those they came from.
void export_weights(const CheckOptions& o, const config::ModelProfile& profile, DType dtype, Device& device) {
  const config::Run run = o.run_of(profile, o.stacks().front(), dtype);
  hf::RunWeights weights(profile.model, o.folder, o.export_hf);
  Session session(profile.model, run, device);
  weights.load_into(session.parameters());
  weights.store_from(session.parameters(), dtype);
  if (const std::string file = hf::first_difference(o.folder, o.export_hf); !file.empty())
    throw Error(ErrorCode::Numeric, fmt::format("{}: differs from what it was read from", (std::filesystem::path(o.export_hf) / file).string()));
  say(fmt::format("{}: the weights written back, byte for byte those of {}", o.export_hf, o.folder));
}

int check_checkpoint(const CheckOptions& o) {
  const config::ModelProfile profile = config::Profiles().model(std::filesystem::path(o.folder).is_absolute() ? o.folder : "./" + o.folder, o.settings);
  const DType dtype = parse_dtype(o.dtype.empty() ? "fp32" : o.dtype);
  std::unique_ptr<Device> device = make_device(o.device);
  if (!o.export_hf.empty()) export_weights(o, profile, dtype, *device);
  if (!std::filesystem::exists(std::filesystem::path(o.folder) / hf::kReferenceFile)) {
    show_fingerprints(o, profile, dtype, *device);
    return 0;
  }
  std::vector<Outcome> outcomes;
  for (const std::string& stack : o.stacks()) {
    const config::Run run = o.run_of(profile, stack, dtype);
    outcomes.push_back({stack, hf::compare_with_reference(o.folder, profile.model, run, plan::Setting::of(run), *device)});
  }
  if (o.format == "json") {
    fmt::print("{}\n", to_json(o, device->name(), std::string(name_of(dtype)), outcomes).dump(2));
  } else {
    report::Document d;
    for (const Outcome& outcome : outcomes) {
      d.heading(fmt::format("{}: stack {}, {}, on {}", o.folder, outcome.stack, name_of(dtype), device->name()));
      hf::add_to(d, outcome.report);
    }
    print(d);
  }
  for (const Outcome& outcome : outcomes)
    if (const hf::Difference* d = outcome.report.first_mismatch())
      throw Error(ErrorCode::Numeric, fmt::format("stack {}: {}", outcome.stack, hf::describe(*d)));
  return 0;
}

// -------------------------------------------------------------------------------- decoding ----

struct DecodeOutcome {
  std::string model, stack;
  std::vector<DecodeCase> cases;
};

std::vector<DecodeOutcome> run_decode(const CheckOptions& o, DType dtype, Device& device) {
  std::vector<DecodeOutcome> outcomes;
  for (const config::ModelProfile& profile : o.profiles())
    for (const std::string& stack : o.stacks()) {
      const config::Run run = decode_check_run(o.run_of(profile, stack, dtype), dtype);
      Session session(profile.model, run, device);
      if (o.folder.empty()) draw_weights(session.parameters(), 1);
      else hf::load(hf::Checkpoint(o.folder, profile.model, session.parameters().table()), session.parameters());
      session.use(plan::Setting::of(run));
      outcomes.push_back({o.folder.empty() ? profile.model.name : o.folder, stack, check_decode(session)});
    }
  return outcomes;
}

int check_decoding(const CheckOptions& o) {
  std::unique_ptr<Device> device = make_device(o.device);
  const DType dtype = !o.dtype.empty() ? parse_dtype(o.dtype) : device->takes(DType::FP32) ? DType::FP32 : DType::BF16;
  if (!device->takes(dtype))
    throw Error(ErrorCode::Config, fmt::format("--decode --dtype {}: '{}' has no kernels for it", name_of(dtype), device->name()), "--dtype bf16, or --device cpu");
  const std::vector<DecodeOutcome> outcomes = run_decode(o, dtype, *device);
  size_t cases = 0;
  nlohmann::ordered_json root{{"schema", "gdn.check/1"}, {"device", device->name()}, {"dtype", name_of(dtype)}};
  report::Document d;
  for (const DecodeOutcome& outcome : outcomes) {
    d.heading(fmt::format("{}: prefill and decode, stack {}, {}, on {}", outcome.model, outcome.stack, name_of(dtype), device->name()));
    report::Table t{"decode", {{"tokens"}, {"passes"}, {"off by", report::Align::Right}, {"allowed", report::Align::Right}}};
    nlohmann::ordered_json rows = nlohmann::ordered_json::array();
    for (const DecodeCase& c : outcome.cases) {
      ++cases;
      t.rows.push_back({c.lengths, c.split, report::Cell(fmt::format("{:.1e}", c.off), c.ok() ? report::Tone::Plain : report::Tone::Bad),
                        fmt::format("{:.1e}", c.allowed)});
      rows.push_back({{"tokens", c.lengths}, {"passes", c.split}, {"off", c.off}, {"allowed", c.allowed}, {"ok", c.ok()}});
    }
    d.table(std::move(t));
    root["results"].push_back({{"model", outcome.model}, {"stack", outcome.stack}, {"cases", rows}});
  }
  d.line(dtype == DType::FP32 ? "off by: the largest difference of a logit to the full forward of the training program, over the largest logit."
                              : "off by: L2 of the difference to the full forward in fp32 on the CPU, over the L2 of that; allowed: twice what the CPU's bf16 is off.");
  if (o.format == "json") fmt::print("{}\n", root.dump(2));
  else print(d);
  for (const DecodeOutcome& outcome : outcomes)
    for (const DecodeCase& c : outcome.cases)
      if (!c.ok())
        throw Error(ErrorCode::Numeric, fmt::format("{}, stack {}: {} tokens, {}: off by {:.1e}, allowed {:.0e}", outcome.model, outcome.stack, c.lengths,
                                                    c.split, c.off, c.allowed));
  say(fmt::format("{} ways to prefill and decode agree with the full forward", cases));
  return 0;
}

int check(const CheckOptions& o) {
  if (!o.folder.empty() && !o.model.empty()) throw Error(ErrorCode::Usage, "give a model or --hf, not both", "a checkpoint's folder has its own config.json");
  if (o.decode && !o.export_hf.empty()) throw Error(ErrorCode::Usage, "--decode writes nothing: leave --export-hf away");
  if (o.decode) return check_decoding(o);
  if (o.folder.empty() && !o.export_hf.empty()) throw Error(ErrorCode::Usage, "--export-hf needs --hf: whose weights?");
  return o.folder.empty() ? check_ops(o) : check_checkpoint(o);
}

} // namespace

cli::Runner add_check(cli::Command& program) {
  cli::Command command = program.subcommand("check", "every op against the same in double; --hf: a Hugging Face checkpoint against reference results");
  auto o = std::make_shared<CheckOptions>();
  command.option("MODEL", o->model, "a model or configuration, small enough to run; profile tiny and a variant of it with gdn2 if not given");
  command.option("--hf", o->folder, "folder with config.json and safetensors weights; with reference.safetensors (input_ids, labels, loss, logits, "
                                         "hidden.I, grad.NAME) loss, activations and gradients are compared");
  command.option("--export-hf", o->export_hf, "write the checkpoint's weights back to this new folder: byte for byte the same");
  command.flag("--decode", o->decode, "prefill and token-by-token decoding against the full forward, however requests are cut into passes");
  command.option("--device", o->device, "cpu, cuda, or auto: cuda where there is one").one_of({"cpu", "cuda", "auto"});
  command.option("--dtype", o->dtype, "dtype of the run: fp32, or bf16 with wider tolerances; ops are checked in both").one_of({"fp32", "bf16"});
  command.option("--stack", o->stack, "native, megatron, or both").one_of({"native", "megatron", "both"});
  command.option("--modules", [o](const std::string& value) {
    for (config::Setting& s : config::modules_settings(value)) o->settings.push_back(std::move(s));
  }, "recompute modules, separated by commas: they change no result");
  command.repeated("--set", [o](const std::string& v) {
    o->settings.push_back(config::parse_setting(v));
  }, "key=value: a key of the model or of the run");
  command.option("--format", o->format, "text or json").one_of({"text", "json"});
  return [o] { return check(*o); };
}

} // namespace gdn::trainer
