// libkvmem_chat: llama.cpp's own chat code (its folder common: jinja templates, tools, JSON schemas, parsers of what
// a model answered) behind a C interface. None of that code lies here; it is compiled from the pinned source tree.
//
// Rules of the C API
//   * requests and results are UTF-8 JSON; member names are those of llama.cpp's structs or of OpenAI's API
//   * int32 results: 0 is success, < 0 is one of enum kvmem_chat_error; nothing throws, and bad input does not abort
//   * *text, if not NULL afterwards, is the result or, on an error, {"what": text, "invalid_argument": bool}; it is
//     the caller's, who frees it with kvmem_chat_free_text. invalid_argument: llama-server answers 400 to this one
//   * JSON in requests nests at most KVMEM_CHAT_MAX_DEPTH deep, and an answer has at most KVMEM_CHAT_MAX_ANSWER_DEPTH
//     brackets open: all of this is read recursively, on the stack of the caller
//   * any thread; calls with one parser or one sampler must not overlap, those with one templates object may
#pragma once

#include <stdint.h>

#if defined(_WIN32)
#define KVMEM_CHAT_API __declspec(dllexport)
#else
#define KVMEM_CHAT_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define KVMEM_CHAT_ABI              2
#define KVMEM_CHAT_MAX_DEPTH        200
#define KVMEM_CHAT_MAX_ANSWER_DEPTH 1000

enum kvmem_chat_error {
    KVMEM_CHAT_OK         = 0,
    KVMEM_CHAT_E_REQUEST  = -1, // a request is not JSON, or a field of it cannot be used
    KVMEM_CHAT_E_TEMPLATE = -2, // the template cannot be read, or raised an error over these messages
    KVMEM_CHAT_E_OUTPUT   = -3, // what the model wrote is not what parser or grammar expect
    KVMEM_CHAT_E_INTERNAL = -4,
};

struct llama_model;
struct llama_sampler;
struct llama_vocab;

struct kvmem_chat_templates; // the templates of one model
struct kvmem_chat_parser;    // reads one answer, in pieces or as a whole

KVMEM_CHAT_API int32_t      kvmem_chat_abi(void);
KVMEM_CHAT_API const char * kvmem_chat_patch_id(void); // of the source tree it was built from
KVMEM_CHAT_API void *       kvmem_chat_llama(void);    // address of llama_model_get_vocab in the libllama it uses
KVMEM_CHAT_API void         kvmem_chat_free_text(char * text);

// -- templates

// Request: {"template": "", "jinja": true, "bos_token": "", "eos_token": ""}, all optional. An empty template: that of
// the model, chatml if it has none; "chatml" is chatml. Without jinja it is recognized as one of llama.cpp's own, or
// names one (llama_chat_builtin_templates), and its code makes the prompts. Without a model the template must be given,
// and the two tokens are its bos and eos. The model is not used after the call.
// Result: {"source", "tool_use_source", "caps": {name: bool}}.
KVMEM_CHAT_API int32_t kvmem_chat_templates_open(
        const struct llama_model * model, const char * request, int64_t n_request,
        struct kvmem_chat_templates ** out, char ** text);
KVMEM_CHAT_API void    kvmem_chat_templates_close(struct kvmem_chat_templates * templates);

// Request: {"messages": [...], "tools": [...], "tool_choice": "auto", "json_schema": ..., "grammar": "",
// "add_generation_prompt": true, "continue_final_message": false, "parallel_tool_calls": bool (as the template can),
// "reasoning_format": "auto", "enable_thinking": true, "chat_template_kwargs": {...}, "force_pure_content": false}.
// All but messages are optional, null is absent.
// Result: members of common_chat_params. "grammar_triggers" is a list of {"type": "word" | "pattern" |
// "pattern_full" | "token", "value", "token"}; "format" is a number, "format_name" its name; "parser" is a text.
KVMEM_CHAT_API int32_t kvmem_chat_apply(
        struct kvmem_chat_templates * templates, const char * request, int64_t n_request, char ** text);

// A JSON schema as GBNF; the result is the grammar itself.
KVMEM_CHAT_API int32_t kvmem_chat_schema_to_grammar(const char * schema, int64_t n_schema, char ** text);

// -- what the model answered

// Request: "format", "parser" and "generation_prompt" of kvmem_chat_apply; "is_continuation": the answer goes on
// from a last message that was rendered too; "echo": and that message is part of the first delta.
KVMEM_CHAT_API int32_t kvmem_chat_parser_open(
        const char * request, int64_t n_request, struct kvmem_chat_parser ** out, char ** text);
KVMEM_CHAT_API void    kvmem_chat_parser_close(struct kvmem_chat_parser * parser);

// The answer as a message of OpenAI's API, whatever was fed before. is_partial: more of it is to come. A tool call
// to which the model gave no id gets one, the same in all results of this parser.
KVMEM_CHAT_API int32_t kvmem_chat_parse(
        struct kvmem_chat_parser * parser, const char * answer, int64_t n_answer, int32_t is_partial,
        char ** text);

// Adds a piece to the answer. Result: what it added to the message, a list of the "delta" objects of OpenAI's API.
// The text so far is parsed again each time; a call that fails leaves the parser as it was before.
KVMEM_CHAT_API int32_t kvmem_chat_feed(
        struct kvmem_chat_parser * parser, const char * piece, int64_t n_piece, int32_t is_partial,
        char ** text);

// -- samplers (freed with llama_sampler_free)

// The grammar of kvmem_chat_apply as a sampler of libllama. Request: "grammar", "grammar_lazy", "grammar_triggers",
// "preserved_tokens", and "prefill", a text that the prompt ends with and the grammar begins with.
KVMEM_CHAT_API int32_t kvmem_chat_grammar_sampler(
        const struct llama_vocab * vocab, const char * request, int64_t n_request,
        struct llama_sampler ** out, char ** text);

// Watches the reasoning of an answer and ends it after a number of tokens. Request: {"start_tag", "end_tags",
// "message": text forced before the first end tag, "budget": tokens or -1, "prefill": as above}.
KVMEM_CHAT_API int32_t kvmem_chat_reasoning_sampler(
        const struct llama_vocab * vocab, const char * request, int64_t n_request,
        struct llama_sampler ** out, char ** text);

// Whether the answer is inside its reasoning: a lazy grammar does not look at it then.
KVMEM_CHAT_API int32_t kvmem_chat_is_reasoning(const struct llama_sampler * reasoning);

// Accepts a token of the answer. Either sampler may be NULL. After an error neither may be used any more.
KVMEM_CHAT_API int32_t kvmem_chat_accept(
        struct llama_sampler * grammar, struct llama_sampler * reasoning, int32_t is_lazy, int32_t token,
        char ** text);

#ifdef __cplusplus
}
#endif
