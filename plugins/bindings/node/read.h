// Reads one attribute of a node, for every framework's binding.
//
// A Node reads an attribute by its name (number, integer, word, numbers, integers) and throws if the attribute has
// another type. `has` returns false only if the node has no attribute of that name. `require` throws an error with its
// message if a condition is false. These functions pass its exceptions on.
#pragma once

#include <initializer_list>
#include <string>

namespace kv {

enum AttributeKind { kFloat, kInt, kWord, kFloats, kInts };
struct AttributeName {
  const char* name;
  AttributeKind kind;
};

template <class Node, class Number>
void check(const Node& node, bool inside, const char* name, Number x, const char* bounds) {
  node.require(inside, std::string(name) + " is " + std::to_string(x) + ", and has to be " + bounds);
}

// Returns the index of a word among the known words.
template <class Node>
int number_of(const Node& node, const char* name, const std::string& word, std::initializer_list<const char*> words) {
  std::string known;
  int i = 0;
  for (const char* one : words) {
    if (word == one) return i;
    known += (i++ ? ", " : "") + std::string(one);
  }
  node.require(false, std::string(name) + " is '" + word + "'; known: " + known);
  return 0;
}

template <class Node>
int read_word(const Node& node, const char* name, std::initializer_list<const char*> words) {
  return number_of(node, name, node.word(name), words);
}

template <class Node>
int integer_at_least(int least, const Node& node, const char* name) {
  const int x = node.integer(name);
  check(node, x >= least, name, x, ("at least " + std::to_string(least)).c_str());
  return x;
}

template <class Node>
int read_switch(const Node& node, const char* name) {
  const int x = node.integer(name);
  check(node, x == 0 || x == 1, name, x, "0 or 1");
  return x;
}

}  // namespace kv
