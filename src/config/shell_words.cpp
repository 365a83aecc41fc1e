#include "config/shell_words.h"

#include <fmt/core.h>

#include "config/text.h"
#include "core/error.h"

namespace gdn::config {

std::vector<ShellWord> shell_words(std::string_view text, const std::string& file) {
  require_text(text, file);
  Positions positions(text, file);
  std::vector<ShellWord> words;
  ShellWord word;
  bool open = false; // inside a word, even an empty quoted one
  auto begin = [&](std::size_t at) {
    if (open) return;
    open = true;
    word = {{}, positions.at(at), false};
  };
  auto flush = [&] {
    if (open) words.push_back(std::move(word));
    open = false;
  };
  auto is_continuation = [&](std::size_t i) {
    return text[i] == '\\' && (text.substr(i + 1, 1) == "\n" || text.substr(i + 1, 2) == "\r\n");
  };
  for (std::size_t i = 0; i < text.size(); ++i) {
    char c = text[i];
    if (c == ' ' || c == '\t' || c == '\n' || c == '\r') {
      flush();
    } else if (c == '#' && !open) {
      while (i + 1 < text.size() && text[i + 1] != '\n') ++i;
    } else if (is_continuation(i)) {
      i += text[i + 1] == '\r' ? 2 : 1;
    } else if (c == '\\') {
      begin(i);
      if (i + 1 < text.size()) word.text += text[++i];
    } else if (c == '\'' || c == '"') {
      std::size_t start = i;
      begin(i);
      for (++i; i < text.size() && text[i] != c; ++i) {
        if (c == '"' && is_continuation(i)) {
          i += text[i + 1] == '\r' ? 2 : 1;
          continue;
        }
        if (c == '"' && text[i] == '\\' && i + 1 < text.size() &&
            std::string_view("\"\\$`").find(text[i + 1]) != std::string_view::npos)
          ++i;
        else if (c == '"' && (text[i] == '$' || text[i] == '`'))
          word.expands = true;
        word.text += text[i];
      }
      if (i >= text.size())
        throw Error(ErrorCode::Config, fmt::format("{}: the quote is never closed", positions.at(start)));
    } else {
      begin(i);
      if (c == '$' || c == '`') word.expands = true;
      word.text += c;
    }
  }
  flush();
  return words;
}

} // namespace gdn::config
