#include "chat_json.h"

#include "kvmem_chat.h"

#include <stdexcept>

using json = common_json;

namespace {

const char * const TRIGGER_NAMES[] = { "token", "word", "pattern", "pattern_full" };

static_assert(COMMON_GRAMMAR_TRIGGER_TYPE_TOKEN == 0 && COMMON_GRAMMAR_TRIGGER_TYPE_WORD == 1 &&
                  COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN == 2 && COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN_FULL == 3,
              "TRIGGER_NAMES must be in the order of common_grammar_trigger_type");

void check_depth(const char * text, size_t n) {
    int  depth     = 0;
    bool in_string = false;
    for (size_t i = 0; i < n; i++) {
        const char c = text[i];
        if (in_string) {
            i += c == '\\';
            in_string = c != '"';
        } else if (c == '"') {
            in_string = true;
        } else if (c == '[' || c == '{') {
            if (++depth > KVMEM_CHAT_MAX_DEPTH) {
                throw std::invalid_argument(
                    "JSON nests deeper than " + std::to_string(KVMEM_CHAT_MAX_DEPTH) + " levels");
            }
        } else if (c == ']' || c == '}') {
            depth--;
        }
    }
}

const json * find(const json & request, const char * name) {
    if (!request.contains(name)) {
        return nullptr;
    }
    const json & value = request.at(name);
    return value.is_null() ? nullptr : &value;
}

[[noreturn]] void refuse(const std::string & name, const std::string & why) {
    throw std::invalid_argument("Field '" + name + "': " + why);
}

// Templates that want objects parse these texts, recursing.
void check_arguments(const std::vector<common_chat_msg> & messages) {
    for (const common_chat_msg & message : messages) {
        for (const common_chat_tool_call & call : message.tool_calls) {
            check_depth(call.arguments.data(), call.arguments.size());
        }
    }
}

// "auto", "none" and "required", or OpenAI's object that names one function: then only that tool is left.
common_chat_tool_choice read_tool_choice(const json & request, std::vector<common_chat_tool> & tools) {
    const json * choice = find(request, "tool_choice");
    if (choice == nullptr) {
        return COMMON_CHAT_TOOL_CHOICE_AUTO;
    }
    if (choice->is_string()) {
        return common_chat_tool_choice_parse_oaicompat(choice->get<std::string>());
    }
    const json * function = choice->is_object() ? find(*choice, "function") : nullptr;
    if (function == nullptr || !function->is_object() || find(*function, "name") == nullptr) {
        refuse("tool_choice", "must be \"auto\", \"none\", \"required\" or name a function");
    }
    const std::string name = read_string(*function, "name");
    for (const common_chat_tool & tool : tools) {
        if (tool.name == name) {
            tools = { common_chat_tool(tool) };
            return COMMON_CHAT_TOOL_CHOICE_REQUIRED;
        }
    }
    refuse("tool_choice", "no tool is named '" + name + "'");
}

std::string read_schema(const json & request) {
    const json * schema = find(request, "json_schema");
    if (schema == nullptr) {
        return "";
    }
    if (!schema->is_object() && !schema->is_boolean()) {
        refuse("json_schema", "must be an object");
    }
    if (schema->is_object() && schema->empty()) {
        return "{\"type\":\"object\"}"; // as in llama-server: an empty schema means any object
    }
    return schema->dump_safe();
}

} // namespace

void check_answer(const std::string & answer) {
    int depth = 0;
    for (const char c : answer) {
        depth += (c == '[' || c == '{') - (c == ']' || c == '}');
        if (depth > KVMEM_CHAT_MAX_ANSWER_DEPTH) {
            throw std::runtime_error(
                "its brackets nest deeper than " + std::to_string(KVMEM_CHAT_MAX_ANSWER_DEPTH) + " levels");
        }
    }
}

json read_json(const std::string & text) {
    check_depth(text.data(), text.size());
    try {
        return json::parse(text);
    } catch (const common_json_error & error) {
        throw std::invalid_argument(std::string("not JSON: ") + error.what());
    }
}

json read_object(const char * text, int64_t n) {
    json request = read_json(std::string(text, (size_t) n));
    if (!request.is_object()) {
        throw std::invalid_argument("a request must be a JSON object");
    }
    return request;
}

bool read_bool(const json & request, const char * name, bool otherwise) {
    const json * value = find(request, name);
    if (value != nullptr && !value->is_boolean()) {
        refuse(name, "must be true or false");
    }
    return value != nullptr ? value->get<bool>() : otherwise;
}

int64_t read_int(const json & request, const char * name, int64_t otherwise) {
    const json * value = find(request, name);
    if (value != nullptr && !value->is_number_integer()) {
        refuse(name, "must be a whole number");
    }
    return value != nullptr ? value->get<long long>() : otherwise;
}

std::string read_string(const json & request, const char * name) {
    const json * value = find(request, name);
    if (value != nullptr && !value->is_string()) {
        refuse(name, "must be a string");
    }
    return value != nullptr ? value->get<std::string>() : std::string();
}

std::vector<std::string> read_strings(const json & request, const char * name) {
    std::vector<std::string> strings;
    const json *             values = find(request, name);
    if (values == nullptr) {
        return strings;
    }
    if (!values->is_array()) {
        refuse(name, "must be a list of strings");
    }
    for (const json & value : *values) {
        if (!value.is_string()) {
            refuse(name, "must be a list of strings");
        }
        strings.push_back(value.get<std::string>());
    }
    return strings;
}

common_chat_templates_inputs read_inputs(const json & request, const common_chat_templates * templates) {
    common_chat_templates_inputs inputs;

    const json * messages = find(request, "messages");
    if (messages == nullptr) {
        refuse("messages", "is missing");
    }
    inputs.messages = common_chat_msgs_parse_oaicompat(*messages);
    check_arguments(inputs.messages);
    const json * tools = find(request, "tools");
    if (tools != nullptr) {
        inputs.tools = common_chat_tools_parse_oaicompat(*tools);
    }
    inputs.tool_choice = read_tool_choice(request, inputs.tools);
    inputs.json_schema = read_schema(request);
    inputs.grammar     = read_string(request, "grammar");
    if (!inputs.json_schema.empty() && !inputs.grammar.empty()) {
        throw std::invalid_argument("'json_schema' and 'grammar' cannot be used together");
    }

    const auto caps            = common_chat_templates_get_caps(templates);
    inputs.parallel_tool_calls = read_bool(request, "parallel_tool_calls", caps.at("supports_parallel_tool_calls"));

    const json * continuation = find(request, "continue_final_message");
    if (continuation != nullptr) {
        inputs.continue_final_message = common_chat_continuation_parse(*continuation);
    }
    const bool continues         = inputs.continue_final_message != COMMON_CHAT_CONTINUATION_NONE;
    inputs.add_generation_prompt = read_bool(request, "add_generation_prompt", !continues);
    if (continues) {
        if (inputs.add_generation_prompt) {
            throw std::invalid_argument(
                "'add_generation_prompt' and 'continue_final_message' cannot both be true");
        }
        if (inputs.messages.empty() || inputs.messages.back().role != "assistant" ||
            !inputs.messages.back().tool_calls.empty()) {
            refuse("continue_final_message", "the last message must be an assistant's, without tool calls");
        }
    }

    const std::string reasoning = read_string(request, "reasoning_format");
    inputs.reasoning_format     = common_reasoning_format_from_name(reasoning.empty() ? "auto" : reasoning);
    inputs.force_pure_content   = read_bool(request, "force_pure_content", false);
    inputs.enable_thinking      = read_bool(request, "enable_thinking", true);
    const json * kwargs         = find(request, "chat_template_kwargs");
    if (kwargs != nullptr) {
        if (!kwargs->is_object()) {
            refuse("chat_template_kwargs", "must be an object");
        }
        for (const auto & item : kwargs->items()) {
            inputs.chat_template_kwargs[item.key()] = item.value().dump_safe();
        }
        inputs.enable_thinking = read_bool(*kwargs, "enable_thinking", inputs.enable_thinking);
    }
    return inputs;
}

json applied_json(const common_chat_params & params) {
    json triggers = json::array();
    for (const common_grammar_trigger & trigger : params.grammar_triggers) {
        triggers.push_back({
            { "type", TRIGGER_NAMES[trigger.type] },
            { "value", trigger.value },
            { "token", trigger.token },
        });
    }
    return json{
        { "prompt", params.prompt },
        { "grammar", params.grammar },
        { "grammar_lazy", params.grammar_lazy },
        { "grammar_triggers", triggers },
        { "preserved_tokens", params.preserved_tokens },
        { "additional_stops", params.additional_stops },
        { "generation_prompt", params.generation_prompt },
        { "supports_thinking", params.supports_thinking },
        { "thinking_start_tag", params.thinking_start_tag },
        { "thinking_end_tags", params.thinking_end_tags },
        { "format", (int) params.format },
        { "format_name", common_chat_format_name(params.format) },
        { "parser", params.parser },
    };
}

std::vector<common_grammar_trigger> read_triggers(const json & request) {
    std::vector<common_grammar_trigger> triggers;
    const json *                        values = find(request, "grammar_triggers");
    if (values == nullptr) {
        return triggers;
    }
    for (const json & value : *values) {
        const std::string type = value.is_object() ? read_string(value, "type") : "";
        size_t            i    = 0;
        while (i < std::size(TRIGGER_NAMES) && type != TRIGGER_NAMES[i]) {
            i++;
        }
        if (i == std::size(TRIGGER_NAMES)) {
            refuse("grammar_triggers", "a trigger must have one of the known types");
        }
        triggers.push_back({ (common_grammar_trigger_type) i, read_string(value, "value"),
                             (llama_token) read_int(value, "token", LLAMA_TOKEN_NULL) });
    }
    return triggers;
}

json delta_json(const common_chat_msg_diff & diff) {
    json delta = json::object();
    if (!diff.reasoning_content_delta.empty()) {
        delta["reasoning_content"] = diff.reasoning_content_delta;
    }
    if (!diff.content_delta.empty()) {
        delta["content"] = diff.content_delta;
    }
    if (diff.tool_call_index == std::string::npos) {
        return delta;
    }
    const common_chat_tool_call & call = diff.tool_call_delta;

    json part{ { "index", diff.tool_call_index } };
    if (!call.id.empty()) {
        part["id"]   = call.id;
        part["type"] = "function";
    }
    json function = json::object();
    if (!call.name.empty()) {
        function["name"] = call.name;
    }
    if (!call.arguments.empty()) {
        function["arguments"] = call.arguments;
    }
    if (!function.empty()) {
        part["function"] = function;
    }
    delta["tool_calls"] = json::array({ part });
    return delta;
}
