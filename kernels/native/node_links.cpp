// Exchanges the parts of one step between nodes. Both directions progress at once; otherwise two nodes that send more
// than the socket buffers hold would deadlock.
#include "native/node_links.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>
#include <vector>

namespace octavo {
namespace {

// One direction of one connection.
struct Transfer {
    int64_t node;  // index of the peer
    int socket;
    short event;  // POLLIN or POLLOUT
    char* data;
    int64_t num_left;

    // Moves what can be moved without blocking; returns why the connection has ended, null if it has not.
    const char* advance() {
        while (num_left > 0) {
            const ssize_t moved = event == POLLOUT ? send(socket, data, num_left, MSG_DONTWAIT | MSG_NOSIGNAL)
                                                   : recv(socket, data, num_left, MSG_DONTWAIT);
            if (moved > 0) {
                data += moved;
                num_left -= moved;
            } else if (moved < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
                return nullptr;
            } else if (moved == 0) {
                return "the other side has closed it";
            } else if (errno != EINTR) {
                return std::strerror(errno);
            }
        }
        return nullptr;
    }
};

// Never returns. The core learns of the end from the other node's agent, and then kills the workers of all nodes.
[[noreturn]] void wait_for_the_end(int64_t node, const Transfer& transfer, const char* reason) {
    std::fprintf(stderr,
                 "octavo: the worker with pid %d on node %d has lost its connection to node %d while exchanging rows: "
                 "%s. It waits for the core to restart all workers; the log of node %d may say why its worker ended\n",
                 static_cast<int>(getpid()), static_cast<int>(node), static_cast<int>(transfer.node), reason,
                 static_cast<int>(transfer.node));
    for (;;) pause();
}

void move_all(int64_t node, std::vector<Transfer>& transfers) {
    std::vector<pollfd> waiting;
    for (;;) {
        waiting.clear();
        for (Transfer& transfer : transfers) {
            if (const char* reason = transfer.advance()) wait_for_the_end(node, transfer, reason);
            if (transfer.num_left > 0) waiting.push_back({transfer.socket, transfer.event, 0});
        }
        if (waiting.empty()) return;
        poll(waiting.data(), waiting.size(), -1);
    }
}

// The bytes of one node's parts: their offset in each piece, and their number.
struct Span {
    int64_t begin, size;
};

}  // namespace

void NodeLinks::exchange(char* area, const Parts& parts, int64_t num_ranks) const {
    const auto span_of = [&](int64_t other) {
        const int64_t begin = parts.width * first_ranks[other] / num_ranks * parts.item_bytes;
        const int64_t end = parts.width * first_ranks[other + 1] / num_ranks * parts.item_bytes;
        return Span{begin, end - begin};
    };
    // Several pieces are packed into one message.
    std::vector<std::vector<char>> packed(num_nodes);
    const auto message_of = [&](int64_t other) {
        const Span span = span_of(other);
        if (parts.count == 1) return area + span.begin;
        packed[other].resize(parts.count * span.size);
        return packed[other].data();
    };
    const auto each_piece = [&](int64_t other, auto copy) {
        const Span span = span_of(other);
        for (int64_t piece = 0; parts.count > 1 && piece < parts.count; ++piece)
            copy(packed[other].data() + piece * span.size, area + piece * parts.stride + span.begin, span.size);
    };
    char* own = message_of(node);
    each_piece(node, [](char* message, const char* piece, int64_t size) { std::memcpy(message, piece, size); });
    std::vector<Transfer> transfers;
    for (int64_t other = 0; other < num_nodes; ++other) {
        if (other == node) continue;
        transfers.push_back({other, sockets[other], POLLOUT, own, parts.count * span_of(node).size});
        transfers.push_back({other, sockets[other], POLLIN, message_of(other), parts.count * span_of(other).size});
    }
    move_all(node, transfers);
    for (int64_t other = 0; other < num_nodes; ++other)
        if (other != node)
            each_piece(other, [](const char* message, char* piece, int64_t size) { std::memcpy(piece, message, size); });
}

}  // namespace octavo
