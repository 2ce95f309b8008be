"""Model files: conversion between attentions, and to and from `transformers`."""
