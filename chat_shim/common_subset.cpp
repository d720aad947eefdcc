// What the compiled files of llama.cpp's common need from files of it that are not compiled, because those bring an
// HTTP client, a thread that writes a log and a command line with them.

#include "common.h"
#include "log.h"

#include <algorithm>
#include <climits>
#include <limits>
#include <stdexcept>

//
// common.h
//

void string_replace_all(std::string & s, const std::string & search, const std::string & replace) {
    if (search.empty()) {
        return;
    }
    for (size_t at = s.find(search); at != std::string::npos; at = s.find(search, at + replace.size())) {
        s.replace(at, search.size(), replace);
    }
}

std::string string_join(const std::vector<std::string> & values, const std::string & separator) {
    std::string joined;
    for (const std::string & value : values) {
        if (&value != values.data()) {
            joined += separator;
        }
        joined += value;
    }
    return joined;
}

std::vector<std::string> string_split(const std::string & str, const std::string & delimiter) {
    std::vector<std::string> parts;
    size_t                   start = 0;
    for (size_t end; (end = str.find(delimiter, start)) != std::string::npos; start = end + delimiter.size()) {
        parts.push_back(str.substr(start, end - start));
    }
    parts.push_back(str.substr(start));
    return parts;
}

std::string string_repeat(const std::string & str, size_t n) {
    std::string repeated;
    repeated.reserve(str.size() * n);
    while (n-- > 0) {
        repeated += str;
    }
    return repeated;
}

std::vector<llama_token> common_tokenize(
        const llama_vocab * vocab, const std::string & text, bool add_special, bool parse_special) {
    if (text.size() > INT_MAX / 2) {
        throw std::invalid_argument("a text of " + std::to_string(text.size()) + " bytes is too long to tokenize");
    }
    std::vector<llama_token> tokens(text.size() + 8); // most texts have fewer tokens than bytes
    for (;;) {
        const int32_t n = llama_tokenize(
            vocab, text.data(), (int32_t) text.size(), tokens.data(), (int32_t) tokens.size(), add_special,
            parse_special);
        if (n == std::numeric_limits<int32_t>::min()) {
            throw std::invalid_argument("a text has more tokens than llama.cpp can count");
        }
        tokens.resize(n < 0 ? -n : n);
        if (n >= 0) {
            return tokens;
        }
    }
}

std::string common_token_to_piece(const llama_vocab * vocab, llama_token token, bool special) {
    std::string piece(32, '\0');
    for (;;) {
        const int32_t n = llama_token_to_piece(vocab, token, &piece[0], (int32_t) piece.size(), 0, special);
        piece.resize(n < 0 ? -n : n);
        if (n >= 0) {
            return piece;
        }
    }
}

//
// log.h: errors come back to the caller as texts, and nothing of a prompt or an answer is written anywhere
//

int common_log_get_verbosity_thold() {
    return -1;
}

common_log * common_log_main() {
    return nullptr;
}

void common_log_add(common_log *, ggml_log_level, const char *, ...) {}
