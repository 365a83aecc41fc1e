#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include <unistd.h>

#include <nlohmann/json.hpp>

#include "command.h"

// The HTML page in a real browser: no error, nothing wider than the window, nothing drawn outside its
// figure, at two widths, light and dark. Skipped (77) where there is no Chromium.

using gdn::test::gdnplan;
using gdn::test::run;

namespace {

std::string browser() {
  for (const char* name : {"chromium", "chromium-browser", "google-chrome"})
    if (run({"sh", "-c", std::string("command -v ") + name}).status == 0) return name;
  return "";
}

struct Folder {
  std::filesystem::path path = std::filesystem::temp_directory_path() / ("gdn_page_" + std::to_string(::getpid()));
  Folder() { std::filesystem::create_directories(path); }
  ~Folder() { std::filesystem::remove_all(path); }
};

// Measures the page from inside and leaves the result in the document.
const char* const kProbe = R"(<script>
window.errors = []; window.addEventListener('error', e => window.errors.push(String(e.message)));
window.addEventListener('load', () => {
  const outside = [], empty = [];
  document.querySelectorAll('svg.figure').forEach(svg => {
    const view = svg.viewBox.baseVal;
    if (svg.getBoundingClientRect().height < 50) empty.push(svg.getAttribute('aria-label'));
    svg.querySelectorAll('text, rect, path, circle').forEach(e => {
      const b = e.getBBox();
      if (b.x < -1 || b.y < -1 || b.x + b.width > view.width + 1 || b.y + b.height > view.height + 1) outside.push(e.textContent || e.tagName);
    });
  });
  const result = { errors: window.errors, outside, empty, width: document.documentElement.scrollWidth, window: window.innerWidth,
    figures: document.querySelectorAll('svg.figure').length, tables: document.querySelectorAll('table').length,
    paper: getComputedStyle(document.body).backgroundColor, ink: getComputedStyle(document.body).color };
  const pre = document.createElement('pre'); pre.id = 'probe'; pre.textContent = JSON.stringify(result); document.body.appendChild(pre);
});
</script></body>)";

nlohmann::json probe(const std::string& chromium, const std::string& file, int width, bool dark) {
  std::string command = "timeout 100 " + chromium + " --headless --no-sandbox --disable-gpu --hide-scrollbars --virtual-time-budget=2000" +
                        " --window-size=" + std::to_string(width) + ",900";
  if (dark) command += " --force-dark-mode --blink-settings=preferredColorScheme=0";
  command += " --dump-dom 'file://" + file + "' > '" + file + ".dom' 2> /dev/null"; // to a file: a slow start outlasts a pipe's reader
  run({"sh", "-c", command});
  std::ostringstream read;
  read << std::ifstream(file + ".dom").rdbuf();
  const std::string dom = read.str();
  const size_t at = dom.find("<pre id=\"probe\">");
  REQUIRE(at != std::string::npos);
  const size_t from = at + 16, to = dom.find("</pre>", from);
  std::string text = dom.substr(from, to - from);
  for (size_t i; (i = text.find("&amp;")) != std::string::npos;) text.replace(i, 5, "&");
  return nlohmann::json::parse(text);
}

} // namespace

TEST_CASE("the page of an estimate and of a plan renders at two widths") {
  Folder folder;
  const std::string chromium = browser();
  for (const char* command : {"estimate", "plan"}) {
    const std::string file = (folder.path / command).string() + ".html";
    REQUIRE(run({gdnplan(), command, "qwen3.5-35b-a3b", "-o", file}).status == 0);
    std::ostringstream text;
    text << std::ifstream(file).rdbuf();
    std::string page = text.str();
    for (const char* remote : {"src=", "href=", "url(", "@import", "<script"}) CHECK(page.find(remote) == std::string::npos); // self-contained
    const size_t end = page.find("</body>");
    REQUIRE(end != std::string::npos);
    page.replace(end, 7, kProbe);
    const std::string probed = (folder.path / command).string() + "_probed.html";
    std::ofstream(probed) << page;
    for (int width : {520, 1280})
      for (bool dark : {false, true}) {
        CAPTURE(command);
        CAPTURE(width);
        const nlohmann::json j = probe(chromium, probed, width, dark);
        CAPTURE(j.dump());
        CHECK(j["errors"].empty());
        CHECK(j["outside"].empty());
        CHECK(j["empty"].empty());
        CHECK(j["width"].get<int>() <= j["window"].get<int>());
        CHECK(j["figures"] == 2);
        CHECK(j["tables"].get<int>() >= 1);
        CHECK(j["paper"] != j["ink"]);
      }
  }
}

int main(int argc, char** argv) {
  if (browser().empty()) {
    std::puts("skipped: no Chromium here");
    return 77;
  }
  doctest::Context context(argc, argv);
  return context.run();
}
