#include "kvmem_chat.h"

#include "chat.h"
#include "chat_json.h"
#include "guard.h"
#include "json-schema-to-grammar.h"
#include "llama.h"

#include <cstdlib>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

using json = common_json;

struct kvmem_chat_templates {
    common_chat_templates_ptr templates;
    bool                      jinja = true; // else llama.cpp's own code makes the prompts
};

struct kvmem_chat_parser {
    common_chat_parser_params params;
    std::string               answer;
    common_chat_msg           message; // of `answer`
    std::vector<std::string>  call_ids;
};

namespace {

// Of the process: rendering asks std::localtime for the date, which has one buffer for all.
std::mutex rendering;

common_chat_templates_ptr read_templates(
        const llama_model * model, const std::string & source, const std::string & bos, const std::string & eos) {
    try {
        return common_chat_templates_init(model, source, bos, eos);
    } catch (const std::exception &) { // it was sliced, and its text is lost: fail again
        const char * own = source.empty() ? llama_model_chat_template(model, nullptr) : source.c_str();
        common_chat_template(own != nullptr ? own : "", bos, eos);
        throw;
    }
}

// Without jinja: throws for a template that llama.cpp has no code for.
void check_builtin(const common_chat_templates * templates) {
    if (common_chat_verify_template(common_chat_templates_source(templates), /* use_jinja */ false)) {
        return;
    }
    std::vector<const char *> names(llama_chat_builtin_templates(nullptr, 0));
    llama_chat_builtin_templates(names.data(), names.size());
    std::string known;
    for (const char * name : names) {
        known += (known.empty() ? "" : ", ") + std::string(name);
    }
    throw std::invalid_argument("without jinja it must be one that llama.cpp knows: " + known);
}

// Without jinja: throws for a text that llama.cpp's code, which takes C strings, would cut.
void check_texts(const std::vector<common_chat_msg> & messages) {
    for (const auto & message : messages) {
        bool cut = message.role.find('\0') != std::string::npos || message.content.find('\0') != std::string::npos;
        for (const auto & part : message.content_parts) {
            cut = cut || part.text.find('\0') != std::string::npos;
        }
        if (cut) {
            throw std::invalid_argument("Field 'messages': without jinja a text cannot hold the character 0");
        }
    }
}

std::string random_id() {
    static const char    characters[] = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
    std::random_device   device;
    std::string          id(32, '\0');
    for (char & c : id) {
        c = characters[device() % (sizeof(characters) - 1)];
    }
    return id;
}

} // namespace

int32_t kvmem_chat_abi() {
    return KVMEM_CHAT_ABI;
}

const char * kvmem_chat_patch_id() {
    return KVMEM_PATCH_ID;
}

void * kvmem_chat_llama() {
    return (void *) &llama_model_get_vocab;
}

void kvmem_chat_free_text(char * text) {
    free(text);
}

//
// templates
//

int32_t kvmem_chat_templates_open(
        const llama_model * model, const char * request, int64_t n_request, kvmem_chat_templates ** out,
        char ** text) {
    return guarded(text, [&](int32_t & phase) {
        const json        options  = read_object(request, n_request);
        const std::string source   = read_string(options, "template");
        const std::string bos      = read_string(options, "bos_token");
        const std::string eos      = read_string(options, "eos_token");
        const bool        jinja    = read_bool(options, "jinja", true);
        if (model == nullptr && source.empty()) {
            throw std::invalid_argument("without a model a template must be given");
        }
        phase = KVMEM_CHAT_E_TEMPLATE;

        const std::lock_guard<std::mutex> lock(rendering);

        auto opened       = std::make_unique<kvmem_chat_templates>();
        opened->jinja     = jinja;
        opened->templates = read_templates(model, source, bos, eos);

        const common_chat_templates * templates = opened->templates.get();
        if (!jinja) {
            check_builtin(templates);
        }

        const json facts{
            { "source", common_chat_templates_source(templates) },
            { "tool_use_source", common_chat_templates_source(templates, "tool_use") },
            { "caps", common_chat_templates_get_caps(templates) },
        };
        std::string result = facts.dump_safe();
        *out               = opened.release();
        return result;
    });
}

void kvmem_chat_templates_close(kvmem_chat_templates * templates) {
    delete templates;
}

int32_t kvmem_chat_apply(kvmem_chat_templates * templates, const char * request, int64_t n_request, char ** text) {
    return guarded(text, [&](int32_t & phase) {
        auto inputs      = read_inputs(read_object(request, n_request), templates->templates.get());
        inputs.use_jinja = templates->jinja;
        if (!templates->jinja) {
            check_texts(inputs.messages);
        }
        phase            = KVMEM_CHAT_E_TEMPLATE;
        const std::lock_guard<std::mutex> lock(rendering);
        return applied_json(common_chat_templates_apply(templates->templates.get(), inputs)).dump_safe();
    });
}

int32_t kvmem_chat_schema_to_grammar(const char * schema, int64_t n_schema, char ** text) {
    return guarded(text, [&](int32_t &) {
        return json_schema_to_grammar(read_json(std::string(schema, (size_t) n_schema)), /* force_gbnf */ true);
    });
}

//
// parser
//

int32_t kvmem_chat_parser_open(
        const char * request, int64_t n_request, kvmem_chat_parser ** out, char ** text) {
    return guarded(text, [&](int32_t & phase) {
        const json    options = read_object(request, n_request);
        const int64_t format  = read_int(options, "format", COMMON_CHAT_FORMAT_CONTENT_ONLY);
        if (format < 0 || format >= COMMON_CHAT_FORMAT_COUNT) {
            throw std::invalid_argument("Field 'format': there is no format " + std::to_string(format));
        }
        auto opened                      = std::make_unique<kvmem_chat_parser>();
        opened->params.format            = (common_chat_format) format;
        opened->params.generation_prompt = read_string(options, "generation_prompt");
        const std::string parser         = read_string(options, "parser");
        if (!parser.empty()) {
            opened->params.parser.load(parser);
        }
        if (read_bool(options, "is_continuation", false) && !read_bool(options, "echo", false)) {
            phase           = KVMEM_CHAT_E_OUTPUT;
            opened->message = common_chat_parse("", /* is_partial */ true, opened->params);
        }
        *out = opened.release();
        return std::string();
    });
}

void kvmem_chat_parser_close(kvmem_chat_parser * parser) {
    delete parser;
}

int32_t kvmem_chat_parse(
        kvmem_chat_parser * parser, const char * answer, int64_t n_answer, int32_t is_partial, char ** text) {
    return guarded(text, [&](int32_t & phase) {
        phase = KVMEM_CHAT_E_OUTPUT;
        const std::string whole(answer, (size_t) n_answer);
        check_answer(whole);
        common_chat_msg message = common_chat_parse(whole, is_partial != 0, parser->params);
        message.set_tool_call_ids(parser->call_ids, random_id);
        return message.to_json_oaicompat().dump_safe();
    });
}

int32_t kvmem_chat_feed(
        kvmem_chat_parser * parser, const char * piece, int64_t n_piece, int32_t is_partial, char ** text) {
    return guarded(text, [&](int32_t & phase) {
        phase = KVMEM_CHAT_E_OUTPUT;
        std::string answer = parser->answer;
        answer.append(piece, (size_t) n_piece);
        check_answer(answer);
        json            deltas  = json::array();
        common_chat_msg message = common_chat_parse(answer, is_partial != 0, parser->params);
        if (!message.empty()) {
            message.set_tool_call_ids(parser->call_ids, random_id);
            for (const auto & diff : common_chat_msg_diff::compute_diffs(parser->message, message)) {
                deltas.push_back(delta_json(diff));
            }
            parser->message = std::move(message);
        }
        parser->answer = std::move(answer);
        return deltas.dump_safe();
    });
}
