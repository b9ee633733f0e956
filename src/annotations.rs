//! Pod annotations as a typed, validated request for a cell. Pure.
