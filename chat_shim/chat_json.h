// From JSON to the structs of llama.cpp's common, and back.
#pragma once

#include "chat.h"

// The JSON object in [text, text + n). Throws std::invalid_argument if it is none, or nests too deep.
common_json read_object(const char * text, int64_t n);

// A JSON value of any kind; same errors. Everything that reads JSON here recurses, and a stack is small.
common_json read_json(const std::string & text);

// What a model wrote is parsed recursively, too. Throws std::runtime_error if its brackets nest too deep.
void check_answer(const std::string & answer);

// Members of a request; one that is null is absent. Throw std::invalid_argument that names a member of another type.
bool                     read_bool(const common_json & request, const char * name, bool otherwise);
int64_t                  read_int(const common_json & request, const char * name, int64_t otherwise);
std::string              read_string(const common_json & request, const char * name);
std::vector<std::string> read_strings(const common_json & request, const char * name);

// What kvmem_chat_apply takes. `templates` says what the template can.
common_chat_templates_inputs read_inputs(const common_json & request, const common_chat_templates * templates);

// What kvmem_chat_apply gives.
common_json applied_json(const common_chat_params & params);

std::vector<common_grammar_trigger> read_triggers(const common_json & request);

// A "delta" of OpenAI's API.
common_json delta_json(const common_chat_msg_diff & diff);
