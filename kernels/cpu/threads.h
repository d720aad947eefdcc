// Threads that live for one call, and a sum whose order does not depend on them.
#pragma once

#include <cstdint>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace kvmem {

// Cache-line aligned array, not initialised.
template <class T> class aligned_array {
public:
    aligned_array() = default;
    explicit aligned_array(size_t n) : data_(static_cast<T *>(::operator new(n * sizeof(T), std::align_val_t(64)))) {}
    T * get() const { return data_.get(); }

private:
    struct release {
        void operator()(T * p) const { ::operator delete(p, std::align_val_t(64)); }
    };
    std::unique_ptr<T, release> data_;
};

// Runs work() on n threads, the caller's among them. A thread that cannot be started is done without.
// The first exception of any of them is thrown to the caller once all have ended.
template <class F> void run_threads(int n, F && work) {
    std::exception_ptr failure;
    std::mutex mutex;
    auto guarded = [&] {
        try {
            work();
        } catch (...) {
            std::lock_guard<std::mutex> lock(mutex);
            if (!failure) {
                failure = std::current_exception();
            }
        }
    };
    std::vector<std::thread> others;
    others.reserve(size_t(n > 1 ? n - 1 : 0));
    for (int i = 1; i < n; ++i) {
        try {
            others.emplace_back(guarded);
        } catch (const std::system_error &) {
            break;
        }
    }
    guarded();
    for (std::thread & t : others) {
        t.join();
    }
    if (failure) {
        std::rethrow_exception(failure);
    }
}

// total[c] += part[c], task after task in the order of their numbers, whichever thread computed them and whenever:
// floating-point addition is not associative, and a score must not depend on timing.
class ordered_sum {
public:
    // Every thread may run `ahead` tasks past the one whose turn it is before it has to wait.
    ordered_sum(double * total, int64_t n, int n_threads)
        : total_(total), n_(n), window_(2 * n_threads), parts_(size_t(window_) * size_t(n)), ready_(size_t(window_)) {}

    // Where task number `task` leaves its part [n]; blocks while the place is still taken.
    float * begin(int64_t task) {
        std::unique_lock<std::mutex> lock(mutex_);
        turn_.wait(lock, [&] { return task < next_ + window_; });
        return parts_.get() + (task % window_) * n_;
    }

    void end(int64_t task) {
        std::lock_guard<std::mutex> lock(mutex_);
        ready_[size_t(task % window_)] = true;
        while (ready_[size_t(next_ % window_)]) {
            const float * part = parts_.get() + (next_ % window_) * n_;
            for (int64_t i = 0; i < n_; ++i) {
                total_[i] += double(part[i]);
            }
            ready_[size_t(next_ % window_)] = false;
            ++next_;
        }
        turn_.notify_all();
    }

private:
    double * total_;
    int64_t n_;
    int64_t window_;
    aligned_array<float> parts_;
    std::vector<bool> ready_;
    int64_t next_ = 0;
    std::mutex mutex_;
    std::condition_variable turn_;
};

} // namespace kvmem
