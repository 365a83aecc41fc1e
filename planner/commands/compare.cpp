#include <algorithm>
#include <cmath>

#include <fmt/core.h>

#include "core/error.h"
#include "planner/commands/commands.h"
#include "planner/results.h"

namespace gdn::planner {

namespace {

// One joined row: how far B is from A.
struct Difference {
  std::string set, key, unit, sources;
  double a = 0, b = 0;
  double relative() const { return a != 0 ? b / a - 1 : b == 0 ? 0 : INFINITY; }
};

struct CompareCommand {
  std::string first, second, observed;
  double fail_above = -1;
  std::string fail_above_text;
  OutputOptions output;

  int run() {
    if (!fail_above_text.empty()) fail_above = parse_percent(fail_above_text);
    config::Profile a = read(first);
    config::Profile b;
    if (!second.empty()) b = read(second);
    else if (!observed.empty()) b = observation(a);
    else throw Error(ErrorCode::Usage, "compare needs a second profile or --observed", "gdnplan compare A.yaml B.yaml, or A.yaml --observed allocated=77.8GB");

    if (!second.empty() && !observed.empty()) throw Error(ErrorCode::Usage, "compare: a second profile and --observed exclude one another");
    // Two single settings under different names are compared with one another: off against on.
    if (a.sets.size() == 1 && b.sets.size() == 1 && a.sets[0].modules != b.sets[0].modules) {
      b.sets[0].modules = a.sets[0].modules = a.sets[0].modules + " | " + b.sets[0].modules;
    }
    std::vector<Difference> rows;
    std::vector<std::string> unmatched;
    for (const char* key : {"model", "stack"})
      if (const std::string x = of(a, key), y = of(b, key); !x.empty() && !y.empty() && x != y) unmatched.push_back(fmt::format("another {}: {} and {}", key, x, y));
    join(a, b, rows, unmatched);
    if (rows.empty())
      throw Error(ErrorCode::Config, fmt::format("'{}' and '{}' have no row in common", first, second.empty() ? "--observed" : second),
                  "profiles are joined by module set and row name; " + (unmatched.empty() ? std::string("one of them is empty") : unmatched.front()));
    const bool failed = fail_above >= 0 && std::any_of(rows.begin(), rows.end(), [&](const Difference& d) { return std::fabs(d.relative()) > fail_above; });
    Output out;
    out.text = text(a, b, rows, unmatched, failed);
    out.json = [&] { return json(a, b, rows, unmatched, failed); };
    write(out, output);
    return failed ? 5 : 0;
  }

  static std::string of(const config::Profile& p, std::string_view key) { // empty: it does not say
    for (const auto& [k, v] : p.identity)
      if (k == key) return v;
    return {};
  }

  // "FILE", or "FILE:SET" for one of its sets.
  static config::Profile read(const std::string& what) {
    const std::size_t colon = what.rfind(".yaml:");
    if (colon == std::string::npos) return config::read_profile(what);
    const std::string set = what.substr(colon + 6);
    config::Profile p = config::read_profile(what.substr(0, colon + 5));
    std::vector<std::string> names;
    for (const config::ProfileSet& s : p.sets) names.push_back(s.modules);
    std::erase_if(p.sets, [&](const config::ProfileSet& s) { return s.modules != set; });
    if (p.sets.empty())
      throw Error(ErrorCode::Config, fmt::format("'{}' has no set '{}'{}", what.substr(0, colon + 5), set, did_you_mean(set, names)));
    return p;
  }

  static double parse_percent(const std::string& text) {
    size_t used = 0;
    double value = -1;
    try { value = std::stod(text, &used); } catch (const std::exception&) {}
    const std::string unit = text.substr(std::min(used, text.size()));
    if (used == 0 || value < 0 || (unit != "%" && !unit.empty()))
      throw Error(ErrorCode::Usage, fmt::format("--fail-above: '{}' is not a percentage", text), "for instance 2%");
    return value / 100;
  }

  // allocated=77.8GB, reserved=80GB, step=2.2 (seconds), for the profile's first set or "modules=...".
  config::Profile observation(const config::Profile& a) const {
    config::Profile b;
    b.identity = {{"kind", "observed"}};
    config::ProfileSet set{a.sets.empty() ? "none" : a.sets.front().modules, {}};
    size_t at = 0;
    while (at <= observed.size()) {
      const size_t comma = std::min(observed.find(',', at), observed.size());
      const std::string item = observed.substr(at, comma - at);
      at = comma + 1;
      const size_t equal = item.find('=');
      const std::string key = item.substr(0, equal), value = equal == std::string::npos ? "" : item.substr(equal + 1);
      const std::vector<std::string> known{"allocated", "reserved", "step", "modules"};
      if (value.empty() || std::find(known.begin(), known.end(), key) == known.end())
        throw Error(ErrorCode::Usage,
                    std::find(known.begin(), known.end(), key) != known.end() ? fmt::format("--observed: '{}' has no value", key)
                                                                               : fmt::format("--observed: '{}'{}", item, did_you_mean(key, known)),
                    "allocated=SIZE, reserved=SIZE, step=SECONDS, modules=SETTING");
      if (key == "modules") set.modules = value;
      else if (key == "step") set.rows.push_back({"time.step_seconds", seconds(value), "seconds", "observed"});
      else set.rows.push_back({"memory." + key + "_bytes", static_cast<double>(decimal_bytes(value)), "bytes", "observed"});
    }
    b.sets.push_back(std::move(set));
    return b;
  }

  static double seconds(const std::string& text) {
    size_t used = 0;
    double value = -1;
    try { value = std::stod(text, &used); } catch (const std::exception&) {}
    if (used == 0 || value <= 0 || (text.substr(used) != "" && text.substr(used) != "s"))
      throw Error(ErrorCode::Usage, fmt::format("--observed: step '{}' is not a time in seconds", text));
    return value;
  }

  // A log's GB is 1e9 bytes; GiB is 2^30. Elsewhere every prefix is a power of 1024.
  static Bytes decimal_bytes(const std::string& text) {
    const bool decimal = text.size() > 2 && text.find('i') == std::string::npos && (text.back() == 'B' || text.back() == 'b');
    const Bytes binary = parse_bytes(text, "--observed");
    if (!decimal) return binary;
    const char unit = static_cast<char>(std::toupper(static_cast<unsigned char>(text[text.size() - 2])));
    const int power = unit == 'K' ? 1 : unit == 'M' ? 2 : unit == 'G' ? 3 : unit == 'T' ? 4 : 0;
    return static_cast<Bytes>(static_cast<double>(binary) * std::pow(1000.0 / 1024.0, power));
  }

  static void join(const config::Profile& a, const config::Profile& b, std::vector<Difference>& rows, std::vector<std::string>& unmatched) {
    for (const config::ProfileSet& set : a.sets) {
      const config::ProfileSet* other = b.find(set.modules);
      if (!other) {
        unmatched.push_back(fmt::format("{}: only in the first", set.modules));
        continue;
      }
      std::int64_t missing = 0;
      for (const config::ProfileRow& r : set.rows) {
        const config::ProfileRow* o = other->find(r.key);
        if (!o) ++missing;
        else rows.push_back({set.modules, r.key, r.unit, r.source + " / " + o->source, r.value, o->value});
      }
      for (const config::ProfileRow& r : other->rows)
        if (!set.find(r.key)) unmatched.push_back(fmt::format("{}: {} only in the second", set.modules, r.key));
      if (missing) unmatched.push_back(fmt::format("{}: {} rows only in the first", set.modules, missing));
    }
    for (const config::ProfileSet& set : b.sets)
      if (!a.find(set.modules)) unmatched.push_back(fmt::format("{}: only in the second", set.modules));
  }

  static std::string value(double v, const std::string& unit) {
    if (unit == "bytes") return format_bytes(static_cast<Bytes>(v));
    if (unit == "seconds") return format_seconds(v);
    return fmt::format("{:.5g} {}", v, unit);
  }

  // What a row belongs to: its key's first part ("categories", "layers", "ops", "memory", "time").
  struct Summary {
    std::string group;
    std::int64_t rows = 0;
    double absolute = 0, sum = 0, worst = 0;
    std::string worst_row = {};

    void add(const Difference& d) {
      const double r = d.relative();
      ++rows;
      absolute += std::fabs(r);
      sum += r;
      if (rows == 1 || std::fabs(r) > std::fabs(worst)) worst = r, worst_row = d.key + (d.set.empty() ? "" : ", " + d.set);
    }
    double mean() const { return absolute / static_cast<double>(rows); }
    double bias() const { return sum / static_cast<double>(rows); }
  };

  // By group in the order they come, then over everything.
  static std::vector<Summary> summaries(const std::vector<Difference>& rows) {
    std::vector<Summary> out;
    Summary all{"all"};
    for (const Difference& r : rows) {
      if ((r.a == 0 && r.b == 0) || !std::isfinite(r.relative())) continue;
      const std::string group = r.key.substr(0, r.key.find('.'));
      auto it = std::find_if(out.begin(), out.end(), [&](const Summary& s) { return s.group == group; });
      if (it == out.end()) it = out.insert(it, Summary{group});
      it->add(r);
      all.add(r);
    }
    if (all.rows > 0) out.push_back(std::move(all));
    return out;
  }

  static std::string origin(const config::Profile& p) {
    std::string text;
    for (const char* key : {"kind", "model", "stack", "hardware", "device"})
      for (const auto& [k, v] : p.identity)
        if (k == key && !v.empty()) text += (text.empty() ? "" : ", ") + v;
    return text;
  }

  report::Document text(const config::Profile& a, const config::Profile& b, const std::vector<Difference>& rows,
                        const std::vector<std::string>& unmatched, bool failed) const {
    report::Document d;
    d.pairs({{"first", fmt::format("{} ({})", first, origin(a))}, {"second", fmt::format("{} ({})", second.empty() ? "--observed" : second, origin(b))}});
    d.heading("Second against first");
    report::Table t{"compare", {{"modules", report::Align::Left, true}, {"row", report::Align::Left, true}, {"first", report::Align::Right}, {"second", report::Align::Right}, {"difference", report::Align::Right}}};
    for (const Difference& r : rows) {
      if (r.a == 0 && r.b == 0) continue;
      const bool over = fail_above >= 0 && std::fabs(r.relative()) > fail_above;
      t.rows.push_back({r.set, r.key, value(r.a, r.unit), value(r.b, r.unit), {std::isfinite(r.relative()) ? percent(r.relative(), 2) : "new", over ? report::Tone::Bad : report::Tone::Plain}});
    }
    d.table(std::move(t));
    const std::vector<Summary> sums = summaries(rows);
    if (sums.size() > 2) {
      d.heading("Errors by kind of row");
      report::Table st{"summary", {{"rows of"}, {"count", report::Align::Right}, {"mean", report::Align::Right}, {"bias", report::Align::Right}, {"worst", report::Align::Right}, {"at", report::Align::Left, true}}};
      for (const Summary& s : sums)
        if (s.group != "all")
          st.rows.push_back({s.group, fmt::format("{}", s.rows), fmt::format("{:.2f} %", 100 * s.mean()), percent(s.bias(), 2), percent(s.worst, 2), s.worst_row});
      d.table(std::move(st));
    }
    if (!sums.empty())
      d.line(fmt::format("{} rows: mean error {:.2f} %, worst {}, bias {}", sums.back().rows, 100 * sums.back().mean(), percent(sums.back().worst, 2), percent(sums.back().bias(), 2)), report::Tone::Strong, 2);
    for (const std::string& u : unmatched) d.line("- " + u, report::Tone::Dim, 2);
    if (failed) d.line(fmt::format("over the tolerance of {:.3g} %", fail_above * 100), report::Tone::Bad, 2);
    return d;
  }

  Json json(const config::Profile& a, const config::Profile& b, const std::vector<Difference>& rows, const std::vector<std::string>& unmatched, bool failed) const {
    auto identity = [](const config::Profile& p) {
      Json j = Json::object();
      for (const auto& [k, v] : p.identity) j[k] = v;
      return j;
    };
    Json j{{"schema", "gdnplan.compare/1"}, {"model", of(a, "model")}, {"stack", of(a, "stack")}, {"build", of(a, "build")}, {"revision", of(a, "revision")},
           {"modules", a.sets.empty() ? "" : a.sets.front().modules}, {"first", identity(a)}, {"second", identity(b)}};
    Json list = Json::array();
    for (const Difference& r : rows)
      list.push_back({{"modules", r.set}, {"row", r.key}, {"unit", r.unit}, {"first", r.a}, {"second", r.b},
                      {"relative", std::isfinite(r.relative()) ? Json(r.relative()) : Json(nullptr)}, {"sources", r.sources}});
    j["rows"] = std::move(list);
    Json sums = Json::array();
    for (const Summary& s : summaries(rows))
      sums.push_back({{"group", s.group}, {"rows", s.rows}, {"mean", s.mean()}, {"bias", s.bias()}, {"worst", s.worst}, {"worst_row", s.worst_row}});
    j["summary"] = std::move(sums);
    j["unmatched"] = unmatched;
    j["over_tolerance"] = failed;
    j["assumptions"] = Json::array();
    j["notices"] = Json::array();
    return j;
  }
};

} // namespace

cli::Runner add_compare(cli::Command& program) {
  auto command = std::make_shared<CompareCommand>();
  cli::Command app = program.subcommand("compare", "two profiles, predicted or measured; or one and a line of one's own log");
  app.option("A", command->first, "a gdn.profile/1 file; FILE:SET takes one of its sets").required();
  app.option("B", command->second, "another one");
  app.option("--observed", command->observed, "allocated=77.8GB[,reserved=...,step=SECONDS,modules=...] (here GB is 1e9 bytes, GiB 2^30)");
  app.option("--fail-above", command->fail_above_text, "end with 5 when a row differs by more, such as 2%");
  command->output.add_to(app, {"text", "json", "csv"});
  app.footer("Example: gdnplan estimate MODEL -o a.yaml && gdnplan compare a.yaml --observed allocated=77.8GB");
  return [command] { return command->run(); };
}

} // namespace gdn::planner
