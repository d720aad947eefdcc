"""C declarations of libkvmem_chat, those of chat_shim/kvmem_chat.h (a test holds the two equal)."""

from __future__ import annotations

from typing import Final

CHAT_ABI: Final = 2

CHAT_CDEF: Final = """
enum kvmem_chat_error {
    KVMEM_CHAT_OK = 0,
    KVMEM_CHAT_E_REQUEST = -1,
    KVMEM_CHAT_E_TEMPLATE = -2,
    KVMEM_CHAT_E_OUTPUT = -3,
    KVMEM_CHAT_E_INTERNAL = -4,
};
struct llama_model;
struct llama_sampler;
struct llama_vocab;
struct kvmem_chat_templates;
struct kvmem_chat_parser;
int32_t kvmem_chat_abi(void);
const char * kvmem_chat_patch_id(void);
void * kvmem_chat_llama(void);
void kvmem_chat_free_text(char * text);
int32_t kvmem_chat_templates_open(
        const struct llama_model * model, const char * request, int64_t n_request,
        struct kvmem_chat_templates ** out, char ** text);
void kvmem_chat_templates_close(struct kvmem_chat_templates * templates);
int32_t kvmem_chat_apply(
        struct kvmem_chat_templates * templates, const char * request, int64_t n_request, char ** text);
int32_t kvmem_chat_schema_to_grammar(const char * schema, int64_t n_schema, char ** text);
int32_t kvmem_chat_parser_open(
        const char * request, int64_t n_request, struct kvmem_chat_parser ** out, char ** text);
void kvmem_chat_parser_close(struct kvmem_chat_parser * parser);
int32_t kvmem_chat_parse(
        struct kvmem_chat_parser * parser, const char * answer, int64_t n_answer, int32_t is_partial,
        char ** text);
int32_t kvmem_chat_feed(
        struct kvmem_chat_parser * parser, const char * piece, int64_t n_piece, int32_t is_partial,
        char ** text);
int32_t kvmem_chat_grammar_sampler(
        const struct llama_vocab * vocab, const char * request, int64_t n_request,
        struct llama_sampler ** out, char ** text);
int32_t kvmem_chat_reasoning_sampler(
        const struct llama_vocab * vocab, const char * request, int64_t n_request,
        struct llama_sampler ** out, char ** text);
int32_t kvmem_chat_is_reasoning(const struct llama_sampler * reasoning);
int32_t kvmem_chat_accept(
        struct llama_sampler * grammar, struct llama_sampler * reasoning, int32_t is_lazy, int32_t token,
        char ** text);
"""
