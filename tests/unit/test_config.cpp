#include <filesystem>
#include <fstream>

#include <doctest/doctest.h>
#include <fmt/core.h>

#include "config/import.h"
#include "config/json.h"
#include "config/profile.h"
#include "config/run_io.h"
#include "config/shell_words.h"
#include "config/text.h"
#include "config/yaml.h"
#include "core/error.h"
#include "tests/temporary_folder.h"
#include "tests/unit/refused.h"

using namespace gdn;
using namespace gdn::config;
using namespace gdn::test;

namespace {

std::string yaml_message(const std::string& text) {
  return message_of([&] { parse_yaml(text, "f.yaml"); });
}

std::int64_t int_of(const std::string& text) { return as_int(*parse_yaml("x: " + text, "f.yaml").find("x"), -100, 100000); }

} // namespace

TEST_CASE("yaml nodes know where they stand") {
  Node doc = parse_yaml("a: 1\nb:\n  - x\n  - {c: 'two words'}\n", "f.yaml");
  CHECK(doc.find("a")->where == "f.yaml:1:4");
  const Node& item = doc.find("b")->items.at(1);
  CHECK(item.find("c")->where == "f.yaml:4:9");
  CHECK(item.find("c")->path == "b[1].c");
  CHECK(item.find("c")->quoted);
  CHECK(item.find("c")->text == "two words");
  CHECK(doc.find("none") == nullptr);
}

TEST_CASE("bad yaml is an error at its position") {
  CHECK(yaml_message("a: 1\nb: 2\na: 3\n") == "f.yaml:3:1: duplicate key 'a'");
  CHECK(yaml_message("") == "f.yaml:1:1: the file is empty");
  CHECK(has(yaml_message("a: [1, 2\nb: 3\n"), "f.yaml:2:"));
  CHECK(has(yaml_message("a: &x 1\nb: *x\n"), "anchors and aliases are not supported"));
  CHECK(has(yaml_message("a: !!int 3\n"), "f.yaml:1:4: tags are not supported"));
  CHECK(has(yaml_message("{[1]: 2}"), "a key must be a word"));
  CHECK(has(yaml_message("~: 2\n"), "f.yaml:1:1: a key is missing"));
  CHECK(has(yaml_message("a: 1\n---\nb: 2\n"), "more than one document"));
  CHECK(has(yaml_message(std::string(40, '[') + std::string(40, ']')), "nested deeper than 32 levels"));
  CHECK(has(yaml_message("a: \xff\xfe\n"), "f.yaml:1:4: is not UTF-8 text (byte 0xff)"));
  CHECK(has(yaml_message(std::string("a: \0b\n", 6)), "f.yaml:1:4: control character 0x00"));
  CHECK(has(yaml_message(std::string(2 << 20, ' ')), "is larger than 256 KiB"));
  // A billion laughs never starts to laugh.
  CHECK(has(yaml_message("a: &a [x, x]\nb: &b [*a, *a]\n"), "not supported"));
  std::string many = "a: [";
  for (int i = 0; i < 30000; ++i) many += "1, ";
  CHECK(has(yaml_message(many + "1]"), "more than 20000 values"));
}

TEST_CASE("integers are plain decimal digits") {
  CHECK(int_of("42") == 42);
  CHECK(int_of("-7") == -7);
  CHECK(int_of("0") == 0);
  auto refused = [](const std::string& text) { return message_of([&] { int_of(text); }); };
  CHECK(has(refused("010"), "f.yaml:1:4: x: expected an integer from -100 to 100000, got '010': leading zeros"));
  CHECK(has(refused("1e3"), "expected an integer from -100 to 100000, got '1e3'"));
  CHECK(has(refused("0x10"), "got '0x10'"));
  CHECK(has(refused("4.0"), "got '4.0'"));
  CHECK(has(refused("'4'"), "got the string '4'"));
  CHECK(has(refused("[4]"), "got a list"));
  CHECK(has(refused("{}"), "got a map"));
  CHECK(has(refused(""), "got nothing"));
  CHECK(has(refused("-101"), "got -101"));
  CHECK(has(refused("99999999999999999999"), "does not fit in 64 bits"));
}

TEST_CASE("numbers, booleans, words and lists") {
  auto node = [](const std::string& text) { return Node::scalar(text, "here", "key"); };
  CHECK(as_double(node("1e-6"), 0, 1) == 1e-6);
  for (const char* bad : {"nan", "inf", "1e999", "2", "0x1p-3", "00.5", "-0.1"})
    CHECK(has(message_of([&] { as_double(node(bad), 0, 1); }), "here: key: expected a number from 0 to 1"));
  CHECK(as_bool(node("true")));
  for (const char* bad : {"yes", "on", "1", "True", ""})
    CHECK(has(message_of([&] { as_bool(node(bad)); }), "expected true or false"));
  CHECK(has(message_of([&] { as_choice(node("selectiv"), {"selective", "full"}); }), "did you mean 'selective'? | allowed: selective, full"));
  CHECK(as_strings(node("[moe, layernorm]")) == std::vector<std::string>{"moe", "layernorm"});
  CHECK(as_strings(node("moe layernorm,mlp")) == std::vector<std::string>{"moe", "layernorm", "mlp"});
  CHECK(as_strings(node("[]")).empty());
  CHECK(as_ints(node("17, 23"), 0, 100) == std::vector<std::int64_t>{17, 23});
}

TEST_CASE("json nodes know where they stand") {
  Node doc = parse_json("{\n \"a\\\"\": [1, -2.5e-06, \"s\\\\\"],\n \"b\": {\"c\": true, \"d\": null}\n}", "c.json");
  const Node& a = *doc.find("a\"");
  CHECK(a.where == "c.json:2:9");
  CHECK(a.items[0].where == "c.json:2:10");
  CHECK(a.items[1].where == "c.json:2:13");
  CHECK(a.items[1].text == "-2.5e-06");
  CHECK(a.items[2].where == "c.json:2:23");
  CHECK(a.items[2].text == "s\\");
  CHECK(doc.find("b")->find("c")->where == "c.json:3:13");
  CHECK(doc.find("b")->find("d")->path == "b.d");
  CHECK(is_none(*doc.find("b")->find("d")));
  CHECK(parse_json("12", "c.json").text == "12");

  auto refused = [](const std::string& text) { return message_of([&] { parse_json(text, "c.json"); }); };
  CHECK(has(refused("{\"a\": 1,\n \"a\": 2}"), "c.json:2:2: duplicate key 'a'"));
  CHECK(has(refused("{\"a\": 1,\n \"b\" 2}"), "c.json:2:6: not JSON"));
  CHECK(has(refused(""), "c.json:1:1: not JSON"));
  CHECK(has(refused(std::string(40, '[')), "nested deeper"));
  CHECK(has(refused("[1e999]"), "not JSON"));
}

TEST_CASE("what is written reads back the same") {
  Node doc;
  doc.set("word", string_node("main+gdn_qkv"));
  doc.set("tricky", list_node(std::vector<std::string>{"true", "010", "null", "a: b", "", "~", "x#y", "- z", "\"q\"", "1e3"}));
  doc.set("number", number_node(std::int64_t{151936}));
  doc.set("small", number_node(1e-6));
  doc.set("empty", list_node(std::vector<std::string>{}));
  Node back = parse_yaml(to_yaml(doc), "again");
  CHECK(as_string(*back.find("word")) == "main+gdn_qkv");
  CHECK(as_strings(*back.find("tricky")) == as_strings(*doc.find("tricky")));
  for (const Node& item : back.find("tricky")->items) CHECK(item.quoted);
  CHECK(as_int(*back.find("number")) == 151936);
  CHECK(as_double(*back.find("small"), 0, 1) == 1e-6);
  CHECK(as_strings(*back.find("empty")).empty());
}

TEST_CASE("files that cannot be configurations") {
  TemporaryFolder folder;
  auto refused = [](const std::filesystem::path& p) { return message_of([&] { read_text_file(p); }); };
  CHECK(has(refused(folder.path()), "is a directory, not a file"));
  CHECK(has(refused(folder / "absent.yaml"), "absent.yaml: no such file"));
  std::ofstream(folder / "huge.yaml") << std::string((256 << 10) + 1, '#');
  CHECK(has(refused(folder / "huge.yaml"), "is larger than 256 KiB"));
  CHECK(has(refused("/dev/zero"), "is larger than 256 KiB"));
}

TEST_CASE("a profile of a whole sweep is read, and one beyond any sweep is refused as a profile") {
  TemporaryFolder folder;
  const std::filesystem::path file = folder / "sweep.yaml";
  std::string text = "schema: gdn.profile/1\nidentity:\n  model: tiny\nsets:\n";
  for (int i = 0; i < 1000; ++i)
    text += fmt::format("  - modules: \"set {}\"\n    rows:\n      step.total_seconds: {{value: {}, unit: seconds, source: \"measured: "
                        "the median of three timed runs, of which the first was thrown away, on a quiet device, by its own timers. "
                        "Each with poisoned memory and guard bands, which are left out of what is allocated\"}}\n", i, i + 1);
  REQUIRE(text.size() > (256 << 10));
  std::ofstream(file) << text;
  const Profile p = read_profile(file);
  REQUIRE(p.sets.size() == 1000);
  CHECK(p.sets[999].find("step.total_seconds")->value == 1000);
  std::ofstream(file) << std::string((8 << 20) + 1, '#');
  CHECK(has(message_of([&] { read_profile(file); }), "is larger than 8192 KiB"));
}

TEST_CASE("run keys: unknown, wrong and overlaid") {
  Run run;
  CHECK(message_of([&] { apply(run, "micro_batchsize", "2", "--set"); }).rfind("--set: unknown key 'micro_batchsize'; did you mean 'micro_batch_size'? | allowed: ", 0) == 0);
  CHECK(message_of([&] { apply(run, "micro_batch_size", "two", "--set"); }) ==
        "--set: micro_batch_size: expected an integer from 1 to 16777216, got 'two' | micro_batch_size: integer >= 1");
  CHECK(has(message_of([&] { apply(run, "micro_batch_size", "0", "--set"); }), "got 0"));
  CHECK(has(message_of([&] { apply(run, "sequence_parallel", "1", "--set"); }), "expected true or false"));
  CHECK(has(message_of([&] { apply(run, "revision", "main+gdn_qvk", "--set"); }), "--set: revision: revision 'main+gdn_qvk': unknown change 'gdn_qvk'; did you mean 'gdn_qkv'?"));
  CHECK(has(message_of([&] { apply(run, "recompute_modules", "moe;rm", "--set"); }), "'moe;rm' is not a name"));
  CHECK(has(message_of([&] { apply(run, parse_yaml("seq_length: 8192\npipeline_size: 2\n", "run.yaml")); }),
            "run.yaml:2:1: unknown key 'pipeline_size'"));
  CHECK(has(message_of([&] { apply(run, parse_yaml("settings:\n  te_versoin: 2.1.0\n", "run.yaml")); }),
            "run.yaml:2:3: settings: unknown key 'te_versoin'; did you mean 'te_version'?"));
  CHECK(has(message_of([&] { apply(run, parse_yaml("[1]", "run.yaml")); }), "expected a map of keys, got a list"));

  // Later ones win key by key; what nobody names stays.
  Run overlaid;
  apply(overlaid, parse_yaml("gpus: 8\nmicro_batch_size: 1\nrecompute_modules: [moe]\n", "profile"));
  apply(overlaid, parse_yaml("micro_batch_size: 2\nsettings: {te_version: null}\n", "run.yaml"));
  apply(overlaid, "recompute_modules", "null", "--set");
  CHECK(overlaid.parallel.gpus == 8);
  CHECK(overlaid.micro_batch == 2);
  CHECK(!overlaid.recompute.modules.has_value());
  CHECK(overlaid.settings.te_version.empty());
  apply(overlaid, "recompute_modules", "[]", "--set"); // an explicit control run, not the default
  CHECK(overlaid.recompute.modules == std::vector<std::string>{});
}

TEST_CASE("the fused loss does not depend on the order of its two keys") {
  for (bool first : {true, false}) {
    Run run;
    if (first) apply(run, "cross_entropy_fusion_impl", "te", "x");
    apply(run, "cross_entropy_loss_fusion", "true", "x");
    if (!first) apply(run, "cross_entropy_fusion_impl", "te", "x");
    CHECK(run.cross_entropy == CrossEntropy::FusedTe);
  }
  Run run;
  apply(run, "cross_entropy_fusion_impl", "te", "x");
  CHECK(run.cross_entropy == CrossEntropy::Unfused);
}

TEST_CASE("every run key survives the echo") {
  Run run;
  const std::pair<const char*, const char*> values[] = {
      {"source", "'ours: a test'"}, {"gpus", "128"}, {"tensor_model_parallel_size", "2"},
      {"context_parallel_size", "2"}, {"pipeline_model_parallel_size", "4"},
      {"virtual_pipeline_model_parallel_size", "3"},
      {"pipeline_model_parallel_layout", "[1, 2, 3, 4]"},
      {"decoder_first_pipeline_num_layers", "5"}, {"decoder_last_pipeline_num_layers", "6"},
      {"expert_model_parallel_size", "8"}, {"expert_tensor_parallel_size", "2"},
      {"cp_comm_type", "a2a+p2p"}, {"micro_batch_size", "3"}, {"global_batch_size", "96"},
      {"seq_length", "8192"}, {"recompute_granularity", "selective"}, {"recompute_method", "block"},
      {"recompute_num_layers", "2"}, {"recompute_modules", "[moe, 'gdn_qkv:discard']"},
      {"spans", "[a=x..y:discard, b=u..v]"}, {"params_dtype", "fp16"}, {"fp8_recipe", "mxfp8"},
      {"main_grads_dtype", "bf16"}, {"main_params_dtype", "fp16"}, {"exp_avg_dtype", "fp8"},
      {"exp_avg_sq_dtype", "bf16"}, {"cross_entropy_fusion_impl", "linear"},
      {"loss_chunk_size", "1024"}, {"make_vocab_size_divisible_by", "1187"}, {"vision", "frozen"},
      {"attention_backend", "unfused"}, {"hidden_dropout", "0.1"}, {"attention_dropout", "0.25"},
      {"experimental_attention_variant", "gdn2"}, {"moe_token_dispatcher_type", "flex"},
      {"moe_expert_capacity_factor", "1.5"}, {"moe_imbalance", "1.25"},
      {"cpu_offloading_num_layers", "2"}, {"offload_modules", "[core_attn]"},
      {"cuda_graph_impl", "local"}, {"cuda_graph_scope", "[attn, moe_router]"}, {"stack", "native"},
      {"build", "local"}, {"revision", "dev+gdn"}, {"l2norm", "kernel"},
      {"te_version", "2.6.0dev0"}, {"fla_version", "null"}, {"torch_version", "2.5.0"},
      {"mhc_recompute_layer_num", "true"}, {"activation", "gelu"},
      {"linear_attention_freq", "[1, 0]"}, {"min_offloaded_tensor_size", "-1"},
      {"activation_offload_fraction", "1.5"}, {"delta_offload_bytes_across_pp_ranks", "-2"},
      {"max_inflight_offloads", "0"}, {"moe_expert_rank_capacity_factor", "2"},
      {"moe_flex_dispatcher_backend", "hybridep"}, {"cuda_graph_warmup_steps", "0"}, {"gtp", "2"},
      {"document_lengths", "[2000, 100x20]"}, {"max_documents", "200"}, {"lora_rank", "8"}, {"lora_targets", "[in_proj]"},
      {"frozen_weight_bits", "4"}, {"optimizer_offload_fraction", "0.5"},
      {"moe_input_jitter_eps", "0.01"}, {"linear_cp_mode", "headwise"},
      {"cp_partition", "contiguous"}};
  std::string defaults = to_yaml(to_node(Run{}));
  for (auto [key, value] : values) apply(run, parse_yaml(std::string(key) + ": " + value, "t"));
  for (const RunKey& k : run_keys()) // switches are turned around; every other key needs a row above
    if (k.allowed == "true | false") apply(run, k.name, as_bool(k.get(Run{})) ? "false" : "true", "t");
  // Each one changed its own line of the echo, and the echo reads back to the same run.
  Node echo = to_node(run), fresh = to_node(Run{});
  for (const RunKey& k : run_keys()) {
    const Node& now = *(k.setting ? echo.find("settings") : &echo)->find(k.name);
    const Node& before = *(k.setting ? fresh.find("settings") : &fresh)->find(k.name);
    INFO(k.name);
    CHECK(to_yaml(now) != to_yaml(before));
  }
  Run again;
  apply(again, parse_yaml(to_yaml(echo), "echo"));
  CHECK(to_yaml(to_node(again)) == to_yaml(echo));
  Run plain;
  apply(plain, parse_yaml(defaults, "echo"));
  CHECK(to_yaml(to_node(plain)) == defaults);
}

TEST_CASE("pipeline layouts") {
  auto layout = [](const std::string& text) { return parse_layout(Node::scalar(text, "here", "layout")); };
  using L = std::vector<std::int64_t>;
  CHECK(layout("17, 23") == L{17, 23});
  CHECK(layout("Et*15|t*15|t*15|t*15mL") == L{15, 15, 15, 15});
  CHECK(layout("Et|(tt|)*3,tmL") == L{1, 2, 2, 2, 1});
  CHECK(layout("Et||L") == L{1, 0, 0});
  CHECK(has(message_of([&] { layout("Ex*3|L"); }), "here: layout: layout 'Ex*3|L': unknown letter 'x'"));
  CHECK(has(message_of([&] { layout("E(t|"); }), "unbalanced"));
  CHECK(has(message_of([&] { layout("Et)|L"); }), "unbalanced"));
  CHECK(has(message_of([&] { layout("((((((((((t*4096)*4096)*4096)*4096)*4096)*4096)*4096)*4096)*4096)*4096)|"); }), "layout"));

  auto resolved = [](std::int64_t pp, std::int64_t vp, const char* first, const char* last, std::int64_t layers) {
    Run run;
    run.parallel.pp = pp;
    run.parallel.vp = vp;
    apply(run, "decoder_first_pipeline_num_layers", first, "x");
    apply(run, "decoder_last_pipeline_num_layers", last, "x");
    resolve_layout(run, layers);
    resolve_layout(run, layers); // a second time changes nothing
    return run.parallel.layout;
  };
  CHECK(resolved(2, 1, "17", "null", 40) == L{17, 23}); // Megatron-Bridge, Qwen3.5-35B on 16 H100
  CHECK(resolved(4, 1, "null", "9", 48) == L{13, 13, 13, 9}); // slime, Qwen3-Next
  CHECK(resolved(2, 1, "null", "30", 64) == L{34, 30}); // slime, 27B
  CHECK(resolved(4, 2, "8", "8", 48) == L{4, 8, 8, 4, 4, 8, 8, 4});
  CHECK(has(message_of([&] { resolved(4, 1, "9", "null", 40); }), "do not divide over 3 stages"));
  CHECK(resolved(4, 1, "null", "null", 40).empty());
  Run run;
  run.parallel.pp = 2;
  run.parallel.layout = {10, 10, 10, 9};
  CHECK(has(message_of([&] { resolve_layout(run, 40); }), "has 39 layers, the model 40"));
}

TEST_CASE("shell words") {
  auto words = [](const std::string& text) {
    std::vector<std::string> out;
    for (const ShellWord& w : shell_words(text, "f")) out.push_back(w.text);
    return out;
  };
  using W = std::vector<std::string>;
  CHECK(words("--a 1 \\\n  --b 'x y' # no\n--c \"z\\\"$q\"") == W{"--a", "1", "--b", "x y", "--c", "z\"$q"});
  CHECK(words("a\\\nb '' c#d") == W{"ab", "", "c#d"});
  CHECK(shell_words("a\n $X", "f")[1].expands);
  CHECK(!shell_words("'$X'", "f")[0].expands);
  CHECK(shell_words("a\n  b", "f")[1].where == "f:2:3");
  CHECK(has(message_of([&] { words("a 'b\nc"); }), "f:1:3: the quote is never closed"));
}
