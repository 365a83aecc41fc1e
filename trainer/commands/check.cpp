#include <memory>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "trainer/commands/commands.h"
#include "trainer/devices.h"
#include "trainer/hf/parity.h"
#include "trainer/options.h"

namespace gdn::trainer {

namespace {

struct CheckOptions {
  std::string folder, device = "auto", dtype = "fp32", stack = "both", format = "text";
  std::vector<config::Setting> settings;
};

struct Outcome {
  std::string stack;
  hf::ParityReport report;
};

nlohmann::ordered_json to_json(const CheckOptions& o, const std::string& device, const std::vector<Outcome>& outcomes) {
  nlohmann::ordered_json root{{"schema", "gdn.check/1"}, {"checkpoint", o.folder}, {"device", device}, {"dtype", o.dtype}};
  for (const Outcome& outcome : outcomes) {
    nlohmann::ordered_json tensors = nlohmann::ordered_json::array();
    for (const hf::Difference& d : outcome.report.rows)
      tensors.push_back({{"name", d.name}, {"measure", d.by_norm ? "L2" : "largest"}, {"off", d.measured()}, {"allowed", d.allowed},
                         {"ok", d.ok()}, {"worst", d.coordinate()}, {"found", d.found}, {"expected", d.expected}});
    root["results"].push_back({{"stack", outcome.stack}, {"ok", outcome.report.first_mismatch() == nullptr}, {"tensors", tensors}});
  }
  return root;
}

int check(const CheckOptions& o) {
  const config::ModelProfile profile = config::Profiles().model(o.folder, o.settings);
  std::unique_ptr<Device> device = make_device(o.device);
  std::vector<std::string> stacks{o.stack};
  if (o.stack == "both") stacks = {"native", "megatron"};
  std::vector<Outcome> outcomes;
  for (const std::string& stack : stacks) {
    config::Run run = profile.run;
    run.stack = stack;
    run.dtype = parse_dtype(o.dtype);
    outcomes.push_back({stack, hf::compare_with_reference(o.folder, profile.model, run, plan::Setting::of(run), *device)});
  }

  if (o.format == "json") {
    fmt::print("{}\n", to_json(o, device->name(), outcomes).dump(2));
  } else {
    report::Document d;
    for (const Outcome& outcome : outcomes) {
      d.heading(fmt::format("{}: stack {}, {}, on {}", o.folder, outcome.stack, o.dtype, device->name()));
      hf::add_to(d, outcome.report);
    }
    print(d);
  }
  for (const Outcome& outcome : outcomes)
    if (const hf::Difference* d = outcome.report.first_mismatch())
      throw Error(ErrorCode::Numeric, fmt::format("stack {}: {}", outcome.stack, hf::describe(*d)));
  return 0;
}

} // namespace

Runner add_check(CLI::App& program) {
  auto* command = program.add_subcommand("check", "a Hugging Face checkpoint's loss, activations and gradients against reference results");
  auto o = std::make_shared<CheckOptions>();
  command->add_option("--hf", o->folder, "folder with config.json, model.safetensors and reference.safetensors (input_ids, labels, loss, "
                                         "logits, hidden.I, grad.NAME)")->required();
  command->add_option("--device", o->device, "cpu, cuda, or auto: cuda where there is one")->check(CLI::IsMember({"cpu", "cuda", "auto"}));
  command->add_option("--dtype", o->dtype, "dtype of the run: fp32, or bf16 with wider tolerances")->check(CLI::IsMember({"fp32", "bf16"}));
  command->add_option("--stack", o->stack, "native, megatron, or both")->check(CLI::IsMember({"native", "megatron", "both"}));
  command->add_option_function<std::string>("--modules", [o](const std::string& value) {
    o->settings.push_back({"recompute_modules", value == "none" ? "[]" : value, "--modules"});
    o->settings.push_back({"recompute_granularity", "selective", "--modules"});
  }, "recompute modules, separated by commas: they change no result");
  command->add_option_function<std::vector<std::string>>("--set", [o](const std::vector<std::string>& values) {
    for (const std::string& v : values) o->settings.push_back(config::parse_setting(v));
  }, "key=value: a key of the model or of the run")->take_all();
  command->add_option("--format", o->format, "text or json")->check(CLI::IsMember({"text", "json"}));
  return [o] { return check(*o); };
}

} // namespace gdn::trainer
