// Grammar and reasoning of an answer as samplers of libllama. How they act on each other is that of llama.cpp's
// common/sampling.cpp, which is not compiled: the rest of it is a sampler chain, and ours is built in Python.

#include "chat_json.h"
#include "guard.h"
#include "llama.h"
#include "reasoning-budget.h"

#include <algorithm>
#include <cctype>
#include <climits>
#include <cmath>
#include <cstring>
#include <memory>

namespace {

struct sampler_deleter {
    void operator()(llama_sampler * sampler) const { llama_sampler_free(sampler); }
};

using sampler_ptr = std::unique_ptr<llama_sampler, sampler_deleter>;

// llama.cpp ends the process over an end-of-generation token that a grammar does not allow: ask first.
void accept_allowed(llama_sampler * grammar, llama_token token) {
    llama_token_data       one   = { token, 1.0f, 0.0f };
    llama_token_data_array array = { &one, 1, -1, false };
    llama_sampler_apply(grammar, &array);
    if (one.logit == -INFINITY) {
        throw std::runtime_error("the grammar does not allow token " + std::to_string(token));
    }
    llama_sampler_accept(grammar, token);
}

std::vector<llama_token> prefill_tokens(const llama_vocab * vocab, const std::string & text) {
    std::vector<llama_token> tokens = common_tokenize(vocab, text, false, true);
    if (!tokens.empty()) { // some tokenizers put a space before the first special token
        const std::string first = common_token_to_piece(vocab, tokens[0], true);
        if (!first.empty() && isspace((unsigned char) first[0]) && !isspace((unsigned char) text[0])) {
            tokens.erase(tokens.begin());
        }
    }
    return tokens;
}

std::string escaped(const std::string & word) {
    std::string pattern;
    for (const char c : word) {
        if (strchr(".^$|()*+?[]{}\\", c) != nullptr && c != '\0') {
            pattern += '\\';
        }
        pattern += c;
    }
    return pattern;
}

std::string anchored(const std::string & pattern) {
    if (pattern.empty()) {
        return "^$";
    }
    return (pattern.front() != '^' ? "^" : "") + pattern + (pattern.back() != '$' ? "$" : "");
}

struct triggers {
    std::vector<std::string> patterns;
    std::vector<llama_token> tokens;

    triggers(const llama_vocab * vocab, const common_json & request) {
        std::vector<llama_token> preserved;
        for (const std::string & text : read_strings(request, "preserved_tokens")) {
            const auto ids = common_tokenize(vocab, text, false, true);
            if (ids.size() == 1) {
                preserved.push_back(ids[0]);
            }
        }
        for (const common_grammar_trigger & trigger : read_triggers(request)) {
            switch (trigger.type) {
                case COMMON_GRAMMAR_TRIGGER_TYPE_TOKEN:
                    if (trigger.token < 0 || trigger.token >= llama_vocab_n_tokens(vocab)) {
                        throw std::invalid_argument(
                            "grammar trigger: there is no token " + std::to_string(trigger.token));
                    }
                    tokens.push_back(trigger.token);
                    break;
                case COMMON_GRAMMAR_TRIGGER_TYPE_WORD: {
                    const auto ids = common_tokenize(vocab, trigger.value, false, true);
                    if (ids.size() != 1) {
                        patterns.push_back(escaped(trigger.value));
                    } else if (std::find(preserved.begin(), preserved.end(), ids[0]) != preserved.end()) {
                        tokens.push_back(ids[0]);
                    } else {
                        throw std::invalid_argument(
                            "grammar trigger '" + trigger.value + "' must be one of the preserved tokens");
                    }
                    break;
                }
                case COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN:
                    patterns.push_back(trigger.value);
                    break;
                case COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN_FULL:
                    patterns.push_back(anchored(trigger.value));
                    break;
            }
        }
        if (patterns.empty() && tokens.empty()) {
            throw std::invalid_argument("a lazy grammar needs a trigger");
        }
    }
};

llama_sampler * lazy_grammar(const llama_vocab * vocab, const std::string & grammar, const common_json & request) {
    const triggers            found(vocab, request);
    std::vector<const char *> patterns;
    for (const std::string & pattern : found.patterns) {
        patterns.push_back(pattern.c_str());
    }
    return llama_sampler_init_grammar_lazy_patterns(
        vocab, grammar.c_str(), "root", patterns.data(), patterns.size(), found.tokens.data(), found.tokens.size());
}

} // namespace

int32_t kvmem_chat_grammar_sampler(
        const llama_vocab * vocab, const char * request, int64_t n_request, llama_sampler ** out, char ** text) {
    return guarded(text, [&](int32_t &) {
        const common_json options = read_object(request, n_request);
        const std::string grammar = read_string(options, "grammar");
        const bool        is_lazy = read_bool(options, "grammar_lazy", false);
        if (grammar.empty()) {
            throw std::invalid_argument("Field 'grammar': is missing");
        }
        sampler_ptr sampler(is_lazy ? lazy_grammar(vocab, grammar, options) :
                                      llama_sampler_init_grammar(vocab, grammar.c_str(), "root"));
        if (sampler == nullptr) {
            throw std::invalid_argument("llama.cpp cannot parse the grammar");
        }
        if (!is_lazy) {
            for (const llama_token token : prefill_tokens(vocab, read_string(options, "prefill"))) {
                accept_allowed(sampler.get(), token);
            }
        }
        *out = sampler.release();
        return std::string();
    });
}

int32_t kvmem_chat_reasoning_sampler(
        const llama_vocab * vocab, const char * request, int64_t n_request, llama_sampler ** out, char ** text) {
    return guarded(text, [&](int32_t &) {
        const common_json options = read_object(request, n_request);
        const int64_t     budget  = read_int(options, "budget", -1);
        const auto        start   = common_tokenize(vocab, read_string(options, "start_tag"), false, true);

        std::vector<llama_tokens> ends;
        for (const std::string & tag : read_strings(options, "end_tags")) {
            if (!tag.empty()) {
                ends.push_back(common_tokenize(vocab, tag, false, true));
            }
        }
        if (start.empty() || ends.empty()) {
            throw std::invalid_argument("the tags that begin and end reasoning must be given");
        }
        if (budget < -1 || budget > INT32_MAX) {
            throw std::invalid_argument("Field 'budget': must be -1 (no limit) to " + std::to_string(INT32_MAX));
        }
        llama_tokens forced = common_tokenize(vocab, read_string(options, "message"), false, true);
        forced.insert(forced.end(), ends[0].begin(), ends[0].end());

        sampler_ptr sampler(common_reasoning_budget_init(
            vocab, { start }, ends, forced, budget < 0 ? INT_MAX : (int32_t) budget));
        for (const llama_token token : prefill_tokens(vocab, read_string(options, "prefill"))) {
            llama_sampler_accept(sampler.get(), token);
        }
        *out = sampler.release();
        return std::string();
    });
}

int32_t kvmem_chat_is_reasoning(const llama_sampler * reasoning) {
    const common_reasoning_budget_state state = common_reasoning_budget_get_state(reasoning);
    return state != REASONING_BUDGET_IDLE && state != REASONING_BUDGET_DONE;
}

int32_t kvmem_chat_accept(
        llama_sampler * grammar, llama_sampler * reasoning, int32_t is_lazy, int32_t token, char ** text) {
    return guarded(text, [&](int32_t & phase) {
        phase = KVMEM_CHAT_E_OUTPUT;
        // Before the token is accepted: the one that ends the reasoning still belongs to it.
        const bool skips = grammar != nullptr && reasoning != nullptr && is_lazy && kvmem_chat_is_reasoning(reasoning);
        if (reasoning != nullptr) {
            llama_sampler_accept(reasoning, token);
        }
        if (grammar != nullptr && !skips) {
            accept_allowed(grammar, token);
        } else if (skips && common_reasoning_budget_get_state(reasoning) == REASONING_BUDGET_DONE) {
            const llama_tokens * end = common_reasoning_budget_get_end_match(reasoning);
            if (end != nullptr) { // it may hold the trigger of the grammar
                for (const llama_token end_token : *end) {
                    accept_allowed(grammar, end_token);
                }
            }
        }
        return std::string();
    });
}
