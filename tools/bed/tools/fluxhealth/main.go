// Prints what Flux's kustomize-controller calls each object by the expressions of its kind, by Flux's own code.
//
// Standard input: {"check": an entry of healthCheckExprs, "objects": [object, …]}.
// Standard output: for each object its status, or Unknown with the error of an expression.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"

	"github.com/fluxcd/pkg/apis/kustomize"
	"github.com/fluxcd/pkg/runtime/cel"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

type question struct {
	Check   json.RawMessage   `json:"check"`
	Objects []json.RawMessage `json:"objects"`
}

type answer struct {
	Status string `json:"status"`
	Error  string `json:"error"`
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "fluxhealth:", err)
		os.Exit(1)
	}
}

func run() error {
	var asked question
	if err := json.NewDecoder(os.Stdin).Decode(&asked); err != nil {
		return err
	}
	var check kustomize.CustomHealthCheck
	if err := json.Unmarshal(asked.Check, &check); err != nil {
		return err
	}
	evaluator, err := cel.NewStatusEvaluator(&check.HealthCheckExpressions)
	if err != nil {
		return err
	}

	answers := make([]answer, 0, len(asked.Objects))
	for number, raw := range asked.Objects {
		object := &unstructured.Unstructured{}
		if err := object.UnmarshalJSON(raw); err != nil {
			return fmt.Errorf("object %d: %w", number, err)
		}
		found, err := evaluator.Evaluate(context.Background(), object)
		if err != nil {
			answers = append(answers, answer{"Unknown", err.Error()})
			continue
		}
		answers = append(answers, answer{string(found.Status), ""})
	}
	return json.NewEncoder(os.Stdout).Encode(answers)
}
