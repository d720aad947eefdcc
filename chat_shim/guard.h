// The border between C++ and C: results and errors as texts, no exception beyond.
#pragma once

#include "json.h"
#include "kvmem_chat.h"

#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>

// A copy that kvmem_chat_free_text frees; NULL if there is no memory for it.
inline char * text_copy(const std::string & text) {
    char * copy = (char *) malloc(text.size() + 1);
    if (copy != nullptr) {
        memcpy(copy, text.c_str(), text.size() + 1);
    }
    return copy;
}

inline int32_t failed(char ** text, int32_t code, const char * what, bool invalid_argument) noexcept {
    try {
        const common_json error{ { "what", what }, { "invalid_argument", invalid_argument } };
        *text = text_copy(error.dump_safe());
    } catch (...) {
        *text = nullptr;
    }
    return code;
}

// Runs call(phase), which gives the text of the result. An exception becomes an error with the code that `phase` had.
template <typename Call> int32_t guarded(char ** text, Call && call) noexcept {
    int32_t phase = KVMEM_CHAT_E_REQUEST;
    *text         = nullptr;
    try {
        *text = text_copy(call(phase));
        return *text != nullptr ? KVMEM_CHAT_OK : KVMEM_CHAT_E_INTERNAL;
    } catch (const std::bad_alloc &) {
        return failed(text, KVMEM_CHAT_E_INTERNAL, "out of memory", false);
    } catch (const std::invalid_argument & error) {
        return failed(text, phase, error.what(), true);
    } catch (const std::exception & error) {
        return failed(text, phase, error.what(), false);
    } catch (...) {
        return failed(text, KVMEM_CHAT_E_INTERNAL, "an unknown error", false);
    }
}
