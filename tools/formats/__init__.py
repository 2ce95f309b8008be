"""Model files: conversion between attention variants, and to and from `transformers`."""
