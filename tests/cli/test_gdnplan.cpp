#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include <nlohmann/json.hpp>

#include "command.h"

using gdn::test::gdnplan;
using gdn::test::Result;
using gdn::test::run;
using Json = nlohmann::json;

namespace {

Result plan(std::vector<std::string> arguments, std::vector<std::string> environment = {}, int columns = 0) {
  arguments.insert(arguments.begin(), gdnplan());
  return run(arguments, environment, columns);
}

struct Folder { // removed at the end
  std::filesystem::path path = std::filesystem::temp_directory_path() / ("gdn_cli_" + std::to_string(::getpid()));
  Folder() { std::filesystem::create_directories(path); }
  ~Folder() { std::filesystem::remove_all(path); }
  std::string file(const std::string& name, const std::string& text = {}) const {
    if (!text.empty()) std::ofstream(path / name) << text;
    return (path / name).string();
  }
};

size_t longest_line(const std::string& text) {
  size_t longest = 0;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) longest = std::max(longest, line.size());
  return longest;
}

} // namespace

TEST_CASE("results go to stdout, messages to stderr, and the exit status says which") {
  Result r = plan({"plan", "qwen3.5-35b-a3b", "--hardware", "h200"});
  CHECK(r.status == 0);
  CHECK(r.err.empty());
  CHECK(r.out.find("Proposal") != std::string::npos);
  r = plan({"--version"});
  CHECK(r.status == 0);
  CHECK(r.out.rfind("gdnplan ", 0) == 0);
  CHECK(plan({"--help"}).status == 0);
  CHECK(plan({"plan", "--help"}).out.find("--budget") != std::string::npos);
}

TEST_CASE("every wrong input ends with code 2, one message, the position and the nearest spelling") {
  Folder folder;
  struct Case {
    std::vector<std::string> arguments;
    const char* mentions;
  };
  const std::vector<Case> cases{
      {{}, ""},
      {{"pln", "tiny"}, "did you mean 'plan'"},
      {{"plan"}, "MODEL"},
      {{"plan", "qwen3.5-35b-a3"}, "qwen3.5-35b-a3b"},
      {{"plan", "tiny", "--hardware", "h20o"}, "h200"},
      {{"plan", "tiny", "--no-such-option"}, "--no-such-option"},
      {{"plan", "tiny", "--bugdet", "80GiB"}, "did you mean '--budget'"},
      {{"plan", "tiny", "--format", "jsn"}, "did you mean 'json'"},
      {{"plan", "tiny", "--solve", "sequence"}, "seq"},
      {{"search", "tiny", "--gpus", "3", "--global-batch", "4", "--solve", "gpu"}, "gpus"},
      {{"plan", "tiny", "--granularity", "full", "--set", "recompute_method=uniform", "--set", "recompute_num_layers=1", "--explore"}, "--explore"},
      {{"plan", "tiny", "--tp", "two"}, "--tp"},
      {{"plan", "tiny", "--set", "micro_batchsize=2"}, "micro_batch_size"},
      {{"plan", "tiny", "--budget", "12XB"}, "--budget"},
      {{"plan", "tiny", "--format", "xml"}, "--format"},
      {{"estimate", "tiny", "--modules", "moe_atc"}, "moe_act"},
      {{"estimate", "tiny", "--span", "broken"}, "--span"},
      {{"estimate", "tiny", "--span", "x=conv1..gates"}, "conv1d"},
      {{"layer", "tiny", "--layer", "99"}, "0 to 3"},
      {{"layer", "qwen3.5-35b-a3b", "--modules", "gdnqkv"}, "gdn_qkv"},
      {{"layer", "qwen3.5-35b-a3b", "--diff", "xx"}, "xx"},
      {{"layer", "qwen3.5-35b-a3b", "--tp", "3"}, "gpus"},
      {{"plan", "qwen3.5-35b-a3b", "--modules", "moe_act"}, "a plan tries every setting"},
      {{"plan", "tiny", "--explore", "--solve", "seq"}, "two questions"},
      {{"search", "tiny", "--tp", "2"}, "a search chooses it"},
      {{"search", "tiny", "--set", "tensor_model_parallel_size=2"}, "--set tensor_model_parallel_size: a search chooses it"},
      {{"estimate", "tiny", "--modules", "moe_act", "--granularity", "full"}, "--granularity asks for 'full'"},
      {{"estimate", "tiny", "--modules", ""}, "no name is given"},
      {{"layer", "tiny", "--diff", " , "}, "no name is given"},
      {{"estimate", "tiny", "--modules", "none,moe"}, "stands alone"},
      {{"estimate", "tiny", "--modules", "moe,moe"}, "listed twice"},
      {{"estimate", "tiny", "--modules", "gdn_rule"}, "stack native has this module"},
      {{"estimate", "tiny", "--stack", "native", "--modules", "gdn_qkv"}, "stack megatron has this module"},
      {{"estimate", "tiny", "--stack", "native", "--span", "gdn_rule=rule..out_proj"}, "is taken"},
      {{"layer", "tiny", "--span", "none=conv1d..gates"}, "is taken"},
      {{"estimate", "tiny", "--run", folder.file("span.yaml", "spans: [\"moe=conv1d..gates\"]\n")}, "is taken"},
      {{"estimate", "tiny", "--set", "spans=[\"a=b..c"}, "not closed"},
      {{"plan", "qwen3.5-35b-a3b", "--span", "a=conv1d..gates"}, "--hypothetical"},
      {{"plan", "qwen3.5-35b-a3b", "--hypothetical", "--span", "a=conv1d..gatess"}, "gates"},
      {{"plan", "qwen3.5-35b-a3b", "--hypothetical", "--span", "moe=conv1d..gates"}, "moe"},
      {{"plan", "qwen3.5-35b-a3b", "--budget", "130"}, "130GiB"},
      {{"check", "qwen3.5-35b-a3b", "--modules", "gdn_qkv:discard"}, ""},
      {{"layer", "tiny", "--layer", "gnd"}, "gdn"},
      {{"plan", "kimi-linear-48b-a3b"}, "KDA"},
      {{"plan", "/nonexistent/model.yaml"}, "/nonexistent/model.yaml"},
      {{"plan", folder.file("bad.yaml", "name: x\nhiden_size: 12\n")}, "bad.yaml:2:1"},
      {{"plan", folder.file("tab.yaml", "name: [\n")}, "tab.yaml"},
      {{"plan", "tiny", "--run", folder.file("run.yaml", "seq_lenght: 12\n")}, "run.yaml:1:1"},
      {{"compare", folder.file("no.yaml")}, "no.yaml"},
      {{"import", "nothing-here"}, "nothing-here"}};
  for (const Case& c : cases) {
    CAPTURE(c.mentions);
    Result r = plan(c.arguments);
    CAPTURE(r.err);
    CHECK(r.status == 2);
    if (c.arguments.empty() || c.arguments[0] != "check") CHECK(r.err.rfind("gdnplan: error: ", 0) == 0);
    CHECK(longest_line(r.err) <= 100);
    if (c.arguments.empty() || c.arguments[0] != "check") CHECK(r.out.empty());
    CHECK(r.err.find(c.mentions) != std::string::npos);
  }
}

TEST_CASE("no output file is left half written") {
  Folder folder;
  const std::string file = folder.file("plan.json");
  CHECK(plan({"plan", "qwen3.5-35b-a3", "-o", file}).status == 2);
  CHECK(!std::filesystem::exists(file));
  CHECK(plan({"plan", "tiny", "-o", folder.file("no/such/folder.json")}).status == 1);
  CHECK(plan({"plan", "tiny", "-o", file}).status == 0);
  CHECK(plan({"plan", "tiny", "-o", "/dev/full"}).status == 1); // written to, never replaced
  CHECK(std::filesystem::is_character_file("/dev/full"));
  std::ifstream in(file);
  CHECK(Json::parse(in)["schema"] == "gdnplan.plan/1");
  for (const auto& entry : std::filesystem::directory_iterator(folder.path))
    CHECK(entry.path().string().find(".tmp") == std::string::npos);
}

TEST_CASE("what does not fit ends with code 3, names the culprit, proposes nothing") {
  Result r = plan({"plan", gdn::test::source_root() + "/examples/qwen3-next-80b-16xh100.yaml", "--format", "json"});
  CHECK(r.status == 3);
  Json j = Json::parse(r.out);
  CHECK(j["proposal"].is_null());
  CHECK(j["overrun"]["bytes"].get<std::int64_t>() > 0);
  CHECK(j["overrun"]["lever"].get<std::string>().find("static state") != std::string::npos);
  CHECK(plan({"estimate", "qwen3.5-35b-a3b", "--budget", "10GiB"}).status == 3);
  CHECK(plan({"check", "qwen3.5-397b-a17b", "--pp", "8"}).status == 2);
  CHECK(plan({"check", "qwen3.5-35b-a3b"}).status == 0);
}

TEST_CASE("colour only on a terminal, and never against NO_COLOR; no line over the width") {
  const std::vector<std::string> command{"plan", "qwen3.5-35b-a3b"};
  CHECK(plan(command).out.find('\x1b') == std::string::npos);
  CHECK(plan(command, {}, 100).out.find('\x1b') != std::string::npos);
  CHECK(plan(command, {"NO_COLOR=1"}, 100).out.find('\x1b') == std::string::npos);
  std::vector<std::string> always = command, never = command;
  always.insert(always.end(), {"--color", "always"});
  never.insert(never.end(), {"--color", "never"});
  CHECK(plan(always, {"NO_COLOR=1"}).out.find('\x1b') != std::string::npos);
  CHECK(plan(never, {}, 100).out.find('\x1b') == std::string::npos);
  for (int columns : {80, 200}) {
    CAPTURE(columns);
    for (const char* name : {"plan", "estimate", "layer", "check"}) {
      CAPTURE(name);
      CHECK(longest_line(plan({name, "qwen3.5-35b-a3b"}, {"NO_COLOR=1"}, columns).out) <= static_cast<size_t>(std::min(columns, 100)));
    }
  }
}

TEST_CASE("JSON has the documented fields") {
  auto has = [](const Json& j, const std::vector<const char*>& keys) {
    for (const char* key : keys) {
      CAPTURE(key);
      CHECK(j.contains(key));
    }
  };
  Json p = Json::parse(plan({"plan", "qwen3.5-35b-a3b", "--format", "json"}).out);
  has(p, {"schema", "model", "stack", "build", "revision", "modules", "assumptions", "notices", "candidates", "proposal"});
  has(p["candidates"][0], {"modules", "granularity", "peak_bytes", "step_seconds", "tokens_per_second", "recompute_seconds", "cost_relative", "fits", "dominated"});
  has(p["proposal"], {"modules", "flags"});
  Json e = Json::parse(plan({"estimate", "qwen3.5-35b-a3b", "--format", "json"}).out);
  has(e, {"schema", "model", "stack", "build", "revision", "modules", "assumptions", "notices", "fits", "memory", "layers", "throughput"});
  has(e["memory"], {"peak_bytes", "peak_phase", "peak_event", "budget_bytes", "categories"});
  has(e["memory"]["categories"], {"parameters", "gradients", "optimizer", "activations", "transient", "logits", "workspace", "communication", "context", "allocator"});
  has(e["layers"][0], {"index", "kind", "retained_bytes", "input_bytes"});
  has(e["throughput"], {"step_seconds", "tokens_per_second", "model_tflops_per_gpu", "mfu", "hfu", "recompute_seconds"});
  Json l = Json::parse(plan({"layer", "qwen3.5-35b-a3b", "--format", "json"}).out);
  has(l, {"schema", "model", "stack", "build", "revision", "modules", "assumptions", "notices", "retained_bytes", "retained_bytes_per_token", "input_bytes",
          "forward_peak_bytes", "backward_peak_bytes", "replay_peak_bytes", "forward_seconds", "backward_seconds", "replay_seconds", "tensors"});
  has(l["tensors"][0], {"name", "shape", "dtype", "bytes", "storage", "state"});
}

TEST_CASE("the GDN layer of the 35B through the command line, as measured") {
  auto layer = [](const char* modules, const char* revision) {
    return Json::parse(plan({"layer", "qwen3.5-35b-a3b", "--layer", "gdn", "--build", "local", "--gpus", "1", "--ep", "1", "--gbs", "1", "--seq", "8192",
                             "--modules", modules, "--revision", revision, "--format", "json"}).out);
  };
  auto beyond_input = [](const Json& j) { return j["retained_bytes_per_token"].get<double>() - j["input_bytes"].get<double>() / 8192; };
  CHECK(beyond_input(layer("none", "main")) == 86592);
  CHECK(beyond_input(layer("gdn_norm_out", "main")) == 78272);
  CHECK(beyond_input(layer("gdn_qkv", "main+gdn_qkv")) == doctest::Approx(53696).epsilon(0.005));
  CHECK(beyond_input(layer("gdn_qkv,gdn_norm_out", "main+gdn_qkv")) == doctest::Approx(45376).epsilon(0.005));
  CHECK(layer("none", "main")["forward_peak_bytes"] == std::int64_t(1060.5 * 1048576));
  CHECK(layer("none", "main")["backward_peak_bytes"] == std::int64_t(1478.0 * 1048576));
}

TEST_CASE("predictions compare with the measured profile, and --fail-above decides") {
  Folder folder;
  const std::string file = folder.file("predicted.yaml"), measured = gdn::test::source_root() + "/profiles/measured/megatron-gdn-35b-h200.yaml";
  CHECK(plan({"layer", "qwen3.5-35b-a3b", "--build", "local", "--gpus", "1", "--ep", "1", "--gbs", "1", "--seq", "8192", "--modules", "none", "--diff", "gdn_qkv", "-o", file}).status == 0);
  Json j = Json::parse(plan({"compare", file, measured, "--format", "json"}).out);
  int bytes = 0;
  for (const Json& row : j["rows"])
    if (row["unit"] == "bytes") {
      ++bytes;
      CHECK(std::abs(row["relative"].get<double>()) < 0.01);
    }
  CHECK(bytes == 6);
  CHECK(plan({"compare", file, measured, "--fail-above", "1%"}).status == 5); // the measured times are launch-bound
  CHECK(plan({"compare", file, file, "--fail-above", "0%"}).status == 0);
  const std::string estimate = folder.file("estimate.yaml");
  CHECK(plan({"estimate", "qwen3.5-35b-a3b", "-o", estimate}).status == 0);
  CHECK(plan({"compare", estimate, "--observed", "allocated=77.8GB"}).status == 0);
  CHECK(plan({"compare", estimate, "--observed", "alocated=77.8GB"}).status == 2);
  CHECK(plan({"compare", estimate, measured}).status == 2); // no row in common is no success
  const std::string ranked = folder.file("plan.yaml");
  CHECK(plan({"plan", "qwen3.5-35b-a3b", "-o", ranked}).status == 0);
  CHECK(plan({"compare", ranked, estimate}).status == 0);
}

TEST_CASE("a hypothetical span is priced and never proposed") {
  Result r = plan({"plan", "qwen3.5-35b-a3b", "--hypothetical", "--span", "prep=conv1d..gates:discard", "--format", "json"});
  CHECK(r.status == 0);
  Json j = Json::parse(r.out);
  bool seen = false;
  for (const Json& c : j["candidates"]) {
    seen = seen || c["hypothetical"].get<bool>();
    CHECK(c["step_seconds"].get<double>() > 0.9 * j["candidates"][0]["step_seconds"].get<double>()); // no phantom is fast
  }
  CHECK(seen);
  CHECK(j["proposal"]["setting"].get<std::string>().find("prep") == std::string::npos);
  // As a key, quoted as in a file, it is the same span.
  auto priced = [](std::vector<std::string> how) {
    how.insert(how.begin(), {"estimate", "qwen3.5-35b-a3b", "--granularity", "selective", "--format", "csv"});
    return plan(how).out;
  };
  CHECK(priced({"--set", "spans=[\"prep=conv1d..gates:discard\"]"}) == priced({"--span", "prep=conv1d..gates:discard"}));
  CHECK(priced({}) != priced({"--span", "prep=conv1d..gates:discard"}));
}

TEST_CASE("search: the front and the best, as text, JSON, CSV and a run file that estimates to the same") {
  Folder folder;
  const std::vector<std::string> search{"search", "qwen3.5-35b-a3b", "--gpus", "8", "--global-batch", "64"};
  auto with = [&](std::vector<std::string> more) {
    std::vector<std::string> all = search;
    all.insert(all.end(), more.begin(), more.end());
    return plan(all);
  };
  Result r = with({});
  CHECK(r.status == 0);
  CHECK(r.err.empty()); // no progress line but on a terminal
  for (const char* part : {"candidates", "alone are over the budget", "priced exactly", "Best: ", "--expert-model-parallel-size"})
    CHECK(r.out.find(part) != std::string::npos);
  const Json j = Json::parse(with({"--format", "json"}).out);
  CHECK(j["schema"] == "gdnplan.search/1");
  CHECK(j["best"] == j["front"][0]);
  const Json& n = j["counts"];
  CHECK(n["candidates"].get<std::int64_t>() ==
        n["static_state"].get<std::int64_t>() + n["memory_bound"].get<std::int64_t>() + n["dominated"].get<std::int64_t>() + n["evaluated"].get<std::int64_t>());
  const std::string file = folder.file("best.yaml");
  CHECK(with({"-o", file}).status == 0);
  const Json e = Json::parse(plan({"estimate", "qwen3.5-35b-a3b", "--run", file, "--format", "json"}).out);
  CHECK(e["memory"]["peak_bytes"] == j["best"]["peak_bytes"]);
  CHECK(e["throughput"]["step_seconds"].get<double>() == doctest::Approx(j["best"]["step_seconds"].get<double>()));
  CHECK(with({"--budget", "20GiB"}).status == 3);
}

TEST_CASE("--solve answers the inverse question on every command that prices a run") {
  auto value = [](std::vector<std::string> arguments) {
    arguments.insert(arguments.end(), {"--format", "json"});
    Result r = plan(arguments);
    CHECK(r.status == 0);
    return Json::parse(r.out)["value"].get<std::int64_t>();
  };
  const std::int64_t given = value({"estimate", "qwen3.5-35b-a3b", "--solve", "seq"}), any = value({"plan", "qwen3.5-35b-a3b", "--solve", "seq"});
  CHECK(given > 4096);
  CHECK(any > given); // recompute makes room
  CHECK(plan({"estimate", "qwen3.5-35b-a3b", "--seq", std::to_string(given)}).status == 0);
  CHECK(value({"estimate", "qwen3.5-35b-a3b", "--solve", "budget"}) > value({"plan", "qwen3.5-35b-a3b", "--solve", "budget"}));
  CHECK(value({"plan", "qwen3.5-35b-a3b", "--solve", "micro-batch"}) > 1);
  CHECK(value({"search", "tiny", "--solve", "gpus"}) == 1);
  CHECK(plan({"estimate", "qwen3.5-35b-a3b", "--budget", "20GiB", "--solve", "seq"}).status == 3);
}

TEST_CASE("explain, explore and compare say what they measured") {
  Result r = plan({"explain", "qwen3.5-35b-a3b", "--modules", "core_attn,moe_act"});
  CHECK(r.status == 0);
  for (const char* part : {"the peak is now in", "largest there", "What each module does", "What would lower the peak"}) CHECK(r.out.find(part) != std::string::npos);
  const Json x = Json::parse(plan({"plan", "qwen3.5-35b-a3b", "--explore", "--format", "json"}).out);
  CHECK(x["tried"].get<int>() > 1000);
  CHECK(x["spans"][0]["bytes_per_millisecond"].get<double>() > x["today"][0]["bytes_per_millisecond"].get<double>());
  Folder folder;
  const std::string a = folder.file("a.yaml"), b = folder.file("b.yaml");
  CHECK(plan({"estimate", "qwen3.5-35b-a3b", "-o", a}).status == 0);
  CHECK(plan({"estimate", "qwen3.5-35b-a3b", "--modules", "moe_act", "-o", b}).status == 0);
  const Json c = Json::parse(plan({"compare", a, b, "--format", "json"}).out);
  bool categories = false, layers = false;
  for (const Json& s : c["summary"]) {
    categories = categories || s["group"] == "categories";
    layers = layers || s["group"] == "layers";
    CHECK(std::abs(s["bias"].get<double>()) <= s["mean"].get<double>() + 1e-12);
    CHECK(s["mean"].get<double>() <= std::abs(s["worst"].get<double>()) + 1e-12);
  }
  CHECK(categories);
  CHECK(layers);
}

TEST_CASE("pages and figures are one self-contained file each") {
  Folder folder;
  auto read = [](const std::string& file) {
    std::ostringstream text;
    text << std::ifstream(file).rdbuf();
    return text.str();
  };
  for (const char* command : {"plan", "estimate"}) {
    const std::string page = folder.file("page.html"), figure = folder.file("figure.svg");
    CHECK(plan({command, "qwen3.5-35b-a3b", "-o", page}).status == 0);
    CHECK(plan({command, "qwen3.5-35b-a3b", "-o", figure}).status == 0);
    const std::string html = read(page), svg = read(figure);
    CHECK(html.rfind("<!doctype html>", 0) == 0);
    CHECK(html.find("prefers-color-scheme: dark") != std::string::npos);
    CHECK(html.find("@media print") != std::string::npos);
    for (const char* remote : {"src=", "href=", "url(", "@import"}) CHECK(html.find(remote) == std::string::npos);
    CHECK(svg.rfind("<svg ", 0) == 0);
    CHECK(svg.find("<style>") != std::string::npos);
    CHECK(svg.size() < 200000);
  }
}

TEST_CASE("a profile's modules do not stand in the way of another stack; import takes arguments as they come") {
  Folder folder;
  const std::string file = folder.file("listed.yaml", "base: tiny\nname: listed\nrun:\n  recompute_granularity: selective\n  recompute_modules: [moe_act]\n");
  Result r = plan({"layer", file, "--stack", "native"});
  CHECK(r.status == 0);
  CHECK(r.out.find("moe_act") != std::string::npos); // says what it left out
  CHECK(plan({"layer", file, "--stack", "native", "--modules", "moe_act"}).status == 2); // asked for by name
  for (std::vector<std::string> form : {std::vector<std::string>{"import", "--", "--tensor-model-parallel-size", "2", "--micro-batch-size", "1"},
                                        std::vector<std::string>{"import", "--tensor-model-parallel-size", "2", "--micro-batch-size", "1"},
                                        std::vector<std::string>{"import", "--tensor-model-parallel-size 2 --micro-batch-size 1"}}) {
    Result i = plan(form);
    CAPTURE(i.err);
    CHECK(i.status == 0);
    CHECK(i.out.find("tensor_model_parallel_size: 2") != std::string::npos);
  }
}

TEST_CASE("the program runs from any directory") {
  Folder folder;
  CHECK(run({gdnplan(), "estimate", "tiny"}, {}, 0, folder.path.string()).status == 0);
}
