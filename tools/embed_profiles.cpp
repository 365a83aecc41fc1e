#include <filesystem>
#include <fstream>
#include <string>

#include <fmt/core.h>

#include "config/packed.h"
#include "config/text.h"
#include "config/yaml.h"
#include "core/error.h"

// Writes a C++ file that holds profiles, as text and parsed: embed_profiles OUT.cpp FUNCTION FILE...
// The function returns them in the order given. Declared in src/config/embedded.h.
namespace {

// A string literal of at most a few KB a piece: compilers limit the length of one.
std::string literal(const std::string& text) {
  std::string out = "\"";
  int length = 0;
  for (const char c : text) {
    if (c == '"' || c == '\\') (out += '\\') += c;
    else if (c == '\n') out += "\\n";
    else if (c >= ' ' && c <= '~') out += c;
    else out += fmt::format("\\{:03o}", static_cast<unsigned>(static_cast<unsigned char>(c)));
    if (++length % 4000 == 0) out += "\"\n\"";
  }
  return out + "\"";
}

} // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  std::string rows;
  try {
    for (int i = 3; i < argc; ++i) {
      const std::filesystem::path file = argv[i];
      const std::string text = gdn::config::read_text_file(file);
      rows += fmt::format("    {{\"{}\",\n{},\n{}}},\n", file.stem().string(), literal(text),
                          literal(gdn::config::pack(gdn::config::parse_yaml(text, file.filename().string()))));
    }
  } catch (const gdn::Error& e) {
    fmt::print(stderr, "{}\n", e.what());
    return 1;
  }
  std::ofstream(argv[1]) << fmt::format("#include \"config/embedded.h\"\n\nnamespace gdn::config {{\n\n"
                                        "const std::vector<EmbeddedFile>& {}() {{\n  static const std::vector<EmbeddedFile> files{{\n{}  }};\n"
                                        "  return files;\n}}\n\n}} // namespace gdn::config\n", argv[2], rows);
}
